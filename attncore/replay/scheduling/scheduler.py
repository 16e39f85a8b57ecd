"""Continuous batching: which requests run in a step, how many tokens each, and in which blocks.

Decodes go first, one token each, and its drafts where there is a draft model; what is left of the step's token budget
goes to prompts in order of arrival, in chunks. A prompt gets all its blocks when it is admitted, a decode as it needs
them. When there is none, the youngest request is preempted: it loses its blocks and later computes its prompt and what
it had generated again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from attncore.replay.scheduling.draft_model import DraftModel
from attncore.replay.scheduling.kv_cache_manager import CacheBlocks, check_pools
from attncore.replay.scheduling.step import Step
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncore.replay.scheduling.running_request import RunningRequest
    from attncore.replay.traces.trace import Request


class Scheduler:
    """``schedule(now)`` plans a step, ``complete(step)`` books it; in between its requests stand as before the step."""

    def __init__(
        self,
        requests: Sequence[Request],
        cache: CacheBlocks,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        draft_model: DraftModel | None = None,
    ) -> None:
        each = 1 + (draft_model.speculation.num_drafts if draft_model else 0)
        if max_num_batched_tokens < max_num_seqs * each:
            what = f"a token and {counted(each - 1, 'draft')}" if draft_model else "a token"
            raise ValueError(
                f"max_num_batched_tokens: {max_num_batched_tokens} is less than max_num_seqs "
                f"{max_num_seqs}{f' times {each}' if draft_model else ''}; "
                f"every running request may need {what} in the same step"
            )
        check_pools(requests, cache.num_blocks, cache.groups)
        self.cache = cache
        self.draft_model = draft_model
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
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
        budget = self.max_num_batched_tokens - step.decode_tokens
        for running in self.running:
            if running.computed < running.goal:
                budget -= self._prefill(step, running, budget)
        # A request preempted in this step does not come back in it: somebody older has taken one of its blocks.
        self._admit(step, budget)
        return step

    def complete(self, step: Step) -> None:
        """Books the step's tokens: its keys and values are now in the cache. Fills ``step.finished``."""
        drafts, new = step.drafts, 1
        for running in step.decodes:
            if drafts:
                new = 1 + step.draft(running).accepted
            running.computed += new
            running.generated += new
            if running.generated == running.request.output_tokens:
                step.finished.append(running)
        for running, count in step.prefills:
            running.computed += count
            if self.cache.publish(running):
                self._admission_may_succeed = True
            if running.computed == running.goal:
                running.generated += 1
                if running.generated == running.request.output_tokens:
                    step.finished.append(running)
        for running in step.finished:
            self.running.remove(running)
            self.cache.release(running)
        if step.finished:
            self._admission_may_succeed = True

    def pass_windows(self) -> dict[int, dict[str, list[int]]]:
        """After a step: the blocks that windows have passed go back to their pools; which, by row and group name."""
        passed = {running.row: self.cache.pass_windows(running) for running in self.running}
        passed = {row: by_group for row, by_group in passed.items() if by_group}
        if passed:
            self._admission_may_succeed = True
        return passed

    def _arrive(self, now: float) -> None:
        while self._arriving and self._arriving[0].arrival <= now:
            request = self._arriving.popleft()
            self._waiting.append(self.cache.running(request))

    def _decode(self, step: Step) -> None:
        running, draft_model, index, context, drafted = self.running, self.draft_model, 0, 0, 0
        while index < len(running):  # preemption takes requests from the end of the list
            decode = running[index]
            index += 1
            length = decode.computed + 1
            if length <= decode.goal:
                continue
            if draft_model is not None:
                draft = draft_model.draw(decode.request.output_tokens - decode.generated - 1)
                length += draft.drafted
            if length > decode.room:
                new = self.cache.grow(decode, length)
                while new is None and running[-1] is not decode:
                    self._preempt(step)
                    new = self.cache.grow(decode, length)
                if new is None:
                    self._preempt(step)
                    break
                step.appended[decode.row] = new
            step.decodes.append(decode)
            if draft_model is not None and draft.drafted:
                step.drafts[decode.row] = draft
                drafted += draft.drafted
            context += length
        step.decode_tokens = len(step.decodes) + drafted
        step.context_tokens = context

    def _preempt(self, step: Step) -> None:
        victim = self.running.pop()
        self.cache.release(victim)
        victim.tables = [[] for _ in victim.tables]
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
            if not self.cache.admit(candidate, alone=not self.running):
                self._admission_may_succeed = False
                return
            self._waiting.popleft()
            self.prefix_hit_tokens += candidate.computed
            self.running.append(candidate)
            step.admitted.append(candidate)
            budget -= self._prefill(step, candidate, budget)
