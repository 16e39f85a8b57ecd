"""One step of a replay, as the scheduler plans it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncore.replay.scheduling.draft_model import NO_DRAFT, Draft

if TYPE_CHECKING:
    from attncore.replay.scheduling.running_request import RunningRequest, Tables


@dataclass(slots=True)
class Step:
    """One step, as the scheduler knows it. ``preempted``, ``admitted`` and ``appended`` (row -> new blocks) happen
    before it, in this order; ``finished`` is known after it. ``drafts`` has, by row, those of decodes that have any."""

    decodes: list[RunningRequest] = field(default_factory=list)
    prefills: list[tuple[RunningRequest, int]] = field(default_factory=list)
    preempted: list[RunningRequest] = field(default_factory=list)
    admitted: list[RunningRequest] = field(default_factory=list)
    appended: dict[int, Tables] = field(default_factory=dict)
    drafts: dict[int, Draft] = field(default_factory=dict)
    finished: list[RunningRequest] = field(default_factory=list)
    decode_tokens: int = 0  # drafts included
    prefill_tokens: int = 0
    context_tokens: int = 0  # sum of the lengths of all requests in the step, this step's tokens included

    @property
    def tokens(self) -> int:
        return self.decode_tokens + self.prefill_tokens

    def draft(self, running: RunningRequest) -> Draft:
        """The drafts that a decode runs."""
        return self.drafts.get(running.row, NO_DRAFT)
