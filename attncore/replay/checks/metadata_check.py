"""Compares the metadata of every k-th step with the oracle: the check of a replay without attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.replay.checks.oracle import WHOLE, Row, Shard, differences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncore.builder.persistent.kv_cache_group import KVCacheGroup
    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.scheduler import Step


class OracleCheck:
    """A comparison is one step, all fields of all groups and ranks together; it is the first step and every
    ``every``-th after it. ``groups`` have the block size of one rank; ``shards`` are the ranks, in order."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        every: int,
        result: Verification,
        *,
        threshold: int = 1,
        shards: Sequence[Shard] = (WHOLE,),
    ) -> None:
        self.groups = groups
        self.every = every
        self.result = result
        self.threshold = threshold
        self.shards = shards

    def __call__(self, number: int, step: Step, *ranks: Any) -> None:
        """Checks step ``number``, the metadata of each rank; its requests stand as before it."""
        if number % self.every:
            return
        self.result.checked += 1
        found = []
        for index, group in enumerate(self.groups):
            planned = planned_rows(step, index)
            for shard, metadata in zip(self.shards, ranks, strict=True):
                of_group = metadata.groups[group.name] if len(self.groups) > 1 else metadata
                where = f"group {group.name}: " if len(self.groups) > 1 else ""
                where += f"rank {shard.rank}: " if len(ranks) > 1 else ""
                sentences = differences(of_group, planned, group.block_size, self.threshold, shard)
                found += [where + sentence for sentence in sentences]
        if found:
            self.result.fail(f"step {number}: {'; '.join(found)[:500]}")


def planned_rows(step: Step, group: int = 0) -> dict[int, Row]:
    """What the scheduler planned, by request, in the blocks of one group."""
    rows = {
        running.row: Row(running.computed, 1 + step.draft(running).drafted, running.tables[group])
        for running in step.decodes
    }
    rows.update({running.row: Row(running.computed, count, running.tables[group]) for running, count in step.prefills})
    return rows
