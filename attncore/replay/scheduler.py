"""Continuous batching: which requests run in a step, how many tokens each, and in which blocks.

Decodes go first, one token each; what is left of the step's token budget goes to prompts in order of arrival, in
chunks. A prompt gets all its blocks when it is admitted, a decode one at a time. When there is none, the youngest
request is preempted: it loses its blocks and later computes its prompt and what it had generated again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attncore.replay.request import HASH_BLOCK, Request

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from attncore.replay.block_pool import BlockPool


class RunningRequest:
    """A request under way. ``goal`` tokens are computed as a prompt before it decodes: the prompt, and after a
    preemption also what it had generated; ``computed`` of its tokens are in the cache."""

    __slots__ = ("blocks", "computed", "generated", "goal", "keys", "published", "request", "row")

    def __init__(self, request: Request, keys: list[Hashable]) -> None:
        self.request = request
        self.row = request.row
        self.keys = keys
        self.blocks: list[int] = []
        self.generated = 0
        self.goal = request.prompt_tokens
        self.computed = 0
        self.published = 0


@dataclass(slots=True)
class Step:
    """One step, as the scheduler knows it. ``preempted``, ``admitted`` and ``appended`` (row -> new block ids) happen
    before it, in this order; ``finished`` is known after it."""

    decodes: list[RunningRequest] = field(default_factory=list)
    prefills: list[tuple[RunningRequest, int]] = field(default_factory=list)
    preempted: list[RunningRequest] = field(default_factory=list)
    admitted: list[RunningRequest] = field(default_factory=list)
    appended: dict[int, list[int]] = field(default_factory=dict)
    finished: list[RunningRequest] = field(default_factory=list)
    prefill_tokens: int = 0
    context_tokens: int = 0  # sum of the lengths of all requests in the step, this step's tokens included

    @property
    def tokens(self) -> int:
        return len(self.decodes) + self.prefill_tokens


class Scheduler:
    """``schedule(now)`` plans a step, ``complete(step)`` books it; in between its requests stand as before the step."""

    def __init__(
        self,
        requests: Sequence[Request],
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {max_num_batched_tokens} is less than max_num_seqs "
                f"{max_num_seqs}; every running request may need a token in the same step"
            )
        check_pool(requests, pool.num_blocks, block_size)
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # Admission leaves these free: a pool filled to the last block preempts the newcomer in the next steps.
        self.watermark = pool.num_blocks // 100
        self.running: list[RunningRequest] = []  # in order of arrival: the last one is the youngest
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self._arriving = deque(requests)
        self._waiting: deque[RunningRequest] = deque()
        self._admission_may_succeed = True  # nothing was freed or published since the last one that did not

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives; None after the last one."""
        return self._arriving[0].arrival if self._arriving else None

    @property
    def unfinished(self) -> int:
        """Requests that have not finished yet, those still to arrive included."""
        return len(self._arriving) + len(self._waiting) + len(self.running)

    def schedule(self, now: float) -> Step | None:
        """The step to run at ``now`` (seconds of virtual time); None when nothing has arrived."""
        self._arrive(now)
        if not self.running and not self._waiting:
            return None
        step = Step()
        self._decode(step)
        # At least 1 while a prompt runs, and one prompt at most is under way: the next is admitted where this one ends.
        budget = self.max_num_batched_tokens - len(step.decodes)
        for running in self.running:
            if running.computed < running.goal:
                budget -= self._prefill(step, running, budget)
        # A request preempted in this step does not come back in it: somebody older has taken one of its blocks.
        self._admit(step, budget)
        return step

    def complete(self, step: Step) -> None:
        """Books the step's tokens: its keys and values are now in the cache. Fills ``step.finished``."""
        for running in step.decodes:
            running.computed += 1
            running.generated += 1
            if running.generated == running.request.output_tokens:
                step.finished.append(running)
        for running, count in step.prefills:
            running.computed += count
            self._publish(running)
            if running.computed == running.goal:
                running.generated += 1
                if running.generated == running.request.output_tokens:
                    step.finished.append(running)
        for running in step.finished:
            self.running.remove(running)
            self.pool.release(running.blocks)
        if step.finished:
            self._admission_may_succeed = True

    def _arrive(self, now: float) -> None:
        while self._arriving and self._arriving[0].arrival <= now:
            request = self._arriving.popleft()
            self._waiting.append(RunningRequest(request, prefix_keys(request, self.block_size)))

    def _decode(self, step: Step) -> None:
        running, block_size, index, context = self.running, self.block_size, 0, 0
        while index < len(running):  # preemption takes requests from the end of the list
            decode = running[index]
            index += 1
            computed = decode.computed
            if computed < decode.goal:
                continue
            if computed == len(decode.blocks) * block_size:
                while not self.pool.num_free and running[-1] is not decode:
                    self._preempt(step)
                if not self.pool.num_free:
                    self._preempt(step)
                    break
                new = self.pool.allocate(1)
                decode.blocks += new
                step.appended[decode.row] = new
            step.decodes.append(decode)
            context += computed + 1
        step.context_tokens = context

    def _preempt(self, step: Step) -> None:
        victim = self.running.pop()
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.goal = victim.request.prompt_tokens + victim.generated
        victim.computed = 0
        self._waiting.appendleft(victim)
        step.preempted.append(victim)
        self.preemptions += 1
        self._admission_may_succeed = True

    def _prefill(self, step: Step, running: RunningRequest, budget: int) -> int:
        count = min(running.goal - running.computed, budget)
        step.prefills.append((running, count))
        step.prefill_tokens += count
        step.context_tokens += running.computed + count
        return count

    def _admit(self, step: Step, budget: int) -> None:
        while self._waiting and budget and len(self.running) < self.max_num_seqs and self._admission_may_succeed:
            candidate = self._waiting[0]
            # At least one token is computed, also when all are cached: its output is the answer.
            hits = self.pool.lookup(candidate.keys[: (candidate.goal - 1) // self.block_size])
            missing = -(-candidate.goal // self.block_size) - len(hits)
            spare = self.watermark if self.running else 0
            if missing + spare > self.pool.num_free - self.pool.num_free_among(hits):
                self._admission_may_succeed = False
                return
            self._waiting.popleft()
            self.pool.hold(hits)
            candidate.blocks = hits + self.pool.allocate(missing)
            candidate.computed = len(hits) * self.block_size
            candidate.published = len(hits)
            self.prefix_hit_tokens += candidate.computed
            self.running.append(candidate)
            step.admitted.append(candidate)
            budget -= self._prefill(step, candidate, budget)

    def _publish(self, running: RunningRequest) -> None:
        """Puts the prompt's full blocks that are now computed into the prefix cache."""
        full = min(running.computed // self.block_size, len(running.keys))
        for index in range(running.published, full):
            self.pool.publish(running.blocks[index], running.keys[index])
            self._admission_may_succeed = True
        running.published = max(running.published, full)


def prefix_keys(request: Request, block_size: int) -> list[Hashable]:
    """One key for each full block of the prompt; equal keys mean equal tokens at equal positions.

    A key is the block's index and the hash ids it touches; an id stands for all that precedes it too. Empty where the
    trace does not say what prompts share.
    """
    ids = request.hash_ids
    if ids is None:
        return []
    return [
        (index, *ids[index * block_size // HASH_BLOCK : ((index + 1) * block_size - 1) // HASH_BLOCK + 1])
        for index in range(request.prompt_tokens // block_size)
    ]


def check_pool(requests: Sequence[Request], num_blocks: int, block_size: int) -> None:
    """A ValueError that names the first request which could not run even alone, and how many blocks it needs."""
    for request in requests:
        # The last token generated is never computed: nothing reads it.
        needed = -(-(request.prompt_tokens + request.output_tokens - 1) // block_size)
        if needed > num_blocks - 1:
            raise ValueError(
                f"num_blocks: row {request.row} of the trace has {request.prompt_tokens} + "
                f"{request.output_tokens} tokens and needs {needed} blocks of {block_size}; --num-blocks "
                f"{num_blocks} has {num_blocks - 1} to hand out, pass at least {needed + 1}"
            )
