"""Compares the metadata of every k-th step with the oracle: the check of a replay without attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.replay.oracle import Row, differences

if TYPE_CHECKING:
    from attncore.replay.measurements import Verification
    from attncore.replay.scheduler import Step


class OracleCheck:
    """A comparison is one step, all fields together; it is the first step and every ``every``-th after it."""

    def __init__(self, block_size: int, every: int, result: Verification) -> None:
        self.block_size = block_size
        self.every = every
        self.result = result

    def __call__(self, number: int, step: Step, metadata: Any) -> None:
        """Checks step ``number``; its requests stand as before it."""
        if number % self.every:
            return
        self.result.checked += 1
        found = differences(metadata, planned_rows(step), self.block_size)
        if found:
            self.result.fail(f"step {number}: {'; '.join(found)[:500]}")


def planned_rows(step: Step) -> dict[int, Row]:
    """What the scheduler planned, by request."""
    rows = {running.row: Row(running.computed, 1, running.blocks) for running in step.decodes}
    rows.update({running.row: Row(running.computed, count, running.blocks) for running, count in step.prefills})
    return rows
