"""A continuous-batching engine: decoder models of transformers, over attncore's metadata and an attention backend.

`generate` yields tokens as they come, or text for a prompt in words; `generate.py` runs it from the command line.
Requests arrive at any time; each step runs what is there: prompts in chunks, decodes one token each. Blocks of a prompt
that were computed once are used again. Where the pool is exhausted the youngest request gives its blocks back and is
computed again later. Steps run in CUDA graphs where there is a GPU. Steps are launched before the tokens of those
before them are read, several where everybody decodes and nobody waits. Sampling is greedy at temperature 0.
The model, its caches and graphs are those of `worker.py`; with `compile=True` its layers are compiled.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from worker import Worker  # first: it says what is not installed

# isort: split
from block_pool import BlockPool
from prompts import TakesPrompts
from request import Request
from run import Run

from attncore.errors import CaptureError


class Engine(TakesPrompts, Worker):
    """``generate`` and ``complete`` run prompts: lists of token ids, or texts where there is a ``tokenizer``.

    Or ``add_request`` and ``cancel`` between steps; ``step`` runs one and returns the requests that it finished.
    Further arguments are those of Worker.

    With graphs a step's tokens are read behind the launch of the next one, or of up to ``ahead`` next ones (0: before
    it). A request that a stop token ends has run some for nothing then.

    Weights that are loaded later are used, and blocks of prefixes that were computed before stay: make another engine.

    Where a step fails, its requests run again, one at a time, past the tokens that they failed at. One that fails alone
    is dropped: ``step`` returns it with its ``error``, and all others finish."""

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any) -> None:
        Worker.__init__(self, model, **options)
        self.tokenizer = tokenizer
        self.pool = BlockPool(self.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # in order of arrival: the last one is the youngest
        self.runs: deque[Run] = deque()  # launched, and not read yet
        self.grown: dict[int, list[int]] = {}  # blocks of running requests that the batch is not given yet
        self.done: list[Request] = []  # what step returns next, also where one before it was interrupted
        self.suspects: dict[Request, int] = {}  # of a step that failed: run alone until so many tokens are computed
        self.preemptions, self._ids = 0, itertools.count()

    def cancel(self, request: Request) -> None:
        """Forgets a request, running, waiting or finished."""
        self.suspects.pop(request, None)
        if self.running.get(request.id) is request:  # another engine's may have the same number
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def __repr__(self) -> str:
        free, blocks = self.pool.num_free, self.num_blocks - 1
        return (
            f"<Engine of {type(self.model).__name__} on {self.device}: {len(self.running)} running, "
            f"{len(self.waiting)} waiting, {free} of {blocks} blocks free>"
        )

    def close(self) -> None:
        """Gives the memory of graphs and caches back; nothing runs afterwards."""
        self.runs.clear()
        super().close()

    def step(self) -> list[Request]:
        """Schedules and launches what runs next, and books what was launched before it; without graphs, the same."""
        scheduled = self._schedule()
        if scheduled is None:
            self._read()
            scheduled = self._schedule()
        if scheduled:
            self._tried(self._launch, Run(scheduled))
        overlaps = scheduled and self.graphs and self.ahead and not self.suspects
        self._read(1 if overlaps else 0)
        done, self.done = self.done, []
        return done

    def _read(self, left: int = 0) -> None:
        """Books all but the last ``left`` runs."""
        while len(self.runs) > left:
            self._tried(self._book, self.runs[0])

    def _tried(self, part: Callable[[Run], None], run: Run) -> None:
        """Where a part of a step fails, the batch counts tokens that were not computed: everybody begins again."""
        try:
            part(run)
        except BaseException as error:
            self._take_back()
            if isinstance(error, Exception) and run not in self.runs:
                self._read()
            failed = {one: end for one, end in run.ends.items() if one.id in self.running and not one.finished}
            self._begin_again()
            if not isinstance(error, Exception):
                raise
            self._suspect(failed, error, alone=len(run.ends) == 1)

    def _take_back(self) -> None:
        """What was built and not replayed is no step."""
        if self.builder.steps_ahead is not None:
            self.builder.steps_ahead.stop()
        if self.builder.last_metadata is not None:
            with suppress(CaptureError):  # which says that no step waits for its replay
                self.builder.last_metadata.abandon()

    def _begin_again(self) -> None:
        for request in reversed(list(self.running.values())):
            self._leave(request, again=True)
        self.runs.clear()

    def _launch(self, run: Run) -> None:
        has_images = any(one.launched <= start < run.ends[one] for one in run.counts for start, _ in one.spans)
        size = None if has_images else self._size_of(len(run.counts), sum(run.counts.values()))
        counts = {name: run.counts.get(request, 0) for name, request in self.running.items()}
        others = {name: count for name, count in counts.items() if count != 1}  # builds run one of each, else
        num_steps = self._num_steps(run) if isinstance(size, int) else 1
        self._give_blocks()
        self._run_steps(others, size, num_steps)
        self.runs.append(run)
        run.launched(num_steps, self.sampled.fetch())

    def _num_steps(self, run: Run) -> int:
        """How many steps of one token each can run without the host, and the blocks for them."""
        if self.waiting or self.suspects or any(one.launched + 1 < len(one.tokens) for one in run.counts):
            return 1
        num_steps = max(1, min(self.ahead, *(request.left for request in run.counts)))
        while num_steps > 1 and sum(self._missing(one, num_steps) for one in run.counts) > self.pool.num_free:
            num_steps -= 1
        for request in run.counts:
            self._grow(request, num_steps)
        return num_steps

    def _suspect(self, failed: dict[Request, int], error: Exception, alone: bool) -> None:
        """Has the requests of a failed step run alone; one that did is dropped."""
        self.suspects |= failed
        if not alone:
            logging.getLogger(__name__).warning("%d requests failed; each runs alone now", len(failed), exc_info=error)
            return
        for request in failed:
            request.error = error
            self.cancel(request)
            self.done.append(request)

    def _schedule_alone(self, request: Request) -> dict[Request, int]:
        """A step of one request. Blocks that it lacks are those of requests that run, which wait for it anyway."""
        count = request.fitting(self.builder.max_num_batched_tokens)
        while not (self._grow(request, count) if request.id in self.running else self._admit(request)):
            self._leave(next(one for one in reversed(self.running.values()) if one is not request), again=True)
        if request in self.waiting:
            self.waiting.remove(request)
            count = request.fitting(count)  # a part of it may have been there already
        return {request: count}

    def _schedule(self) -> dict[Request, int] | None:
        """Tokens of this step by request: first of those that run, in order of arrival, then of new ones.

        None where blocks are missing, and what was launched may give some back."""
        if self.suspects:
            return self._schedule_alone(next(iter(self.suspects)))
        scheduled: dict[Request, int] = {}
        budget, preemptions = self.builder.max_num_batched_tokens, self.preemptions
        for request in list(self.running.values()):
            count = request.fitting(budget)
            while request.id in self.running and not self._grow(request, count):
                if self.runs:
                    return None
                youngest = next(reversed(self.running.values()))
                budget += scheduled.pop(youngest, 0)
                self._leave(youngest, again=True)
                self.preemptions += 1
            if request.id in self.running and count:  # else preempted by one that is older, or nothing is left
                scheduled[request] = count
                budget -= count
        if self.preemptions > preemptions:
            return scheduled  # whoever lost its blocks in this step does not come back in it
        while self.waiting and budget and len(self.running) < self.batch.max_num_reqs and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            if count := request.fitting(budget):
                scheduled[request] = count
                budget -= count
        return scheduled

    def _admit(self, request: Request) -> bool:
        """Gives a request blocks for all its tokens, those of a prefix that is there already; False: too few are."""
        keys = (request.key(i, self.block_size) for i in range((len(request.tokens) - 1) // self.block_size))
        # One token is computed. The blocks of a prefix are of no use without the state behind it, which nobody keeps.
        # Nor is one of a prompt with images, of which the tokens do not say which they are.
        alone = self.recurrent or request.spans
        shared = [] if alone else list(itertools.takewhile(bool, map(self.pool.share, keys)))
        own = self.pool.take(-(-len(request.tokens) // self.block_size) - len(shared))
        if own is None:
            self.pool.give_back(shared)
            return False
        request.blocks, request.computed = shared + own, len(shared) * self.block_size
        request.launched, request.place = request.computed, self.sampled.free.pop()
        said = request.tokens, request.blocks, request.computed, request.temperature, request.place
        self._add(request.id, *said, request.spans, request.images)
        self.running[request.id] = request
        return True

    def _grow(self, request: Request, count: int) -> bool:
        """Blocks for the next ``count`` tokens; False where the pool has too few."""
        missing = self._missing(request, count)
        blocks = self.pool.take(missing) if missing else []
        if blocks:
            request.blocks += blocks
            self.grown.setdefault(request.id, []).extend(blocks)
        return blocks is not None

    def _give_blocks(self) -> None:
        if self.grown:
            self._append(self.grown)
            self.grown.clear()

    def _missing(self, request: Request, count: int) -> int:
        return max(-(-(request.launched + count) // self.block_size) - len(request.blocks), 0)

    def _leave(self, request: Request, again: bool = False) -> None:
        self._give_blocks()
        del self.running[request.id]
        for run in self.runs:
            run.counts.pop(request, None)
        self.pool.give_back(self._remove(request.id))
        self.sampled.free.append(request.place)
        request.blocks, request.computed, request.launched = [], 0, 0
        if request.finished:
            self.done.append(request)
        elif again:
            self.waiting.appendleft(request)

    def _book(self, run: Run) -> None:
        """Appends what a run has sampled, counts its tokens as computed, and publishes blocks that they filled."""
        sampled = run.tokens.tolist() if run.counts else []
        for request, count in list(run.counts.items()):
            first = request.computed // self.block_size
            for more in (count, *[1] * (run.num_steps - 1)):
                request.computed += more
                if request.computed == len(request.tokens):
                    request.tokens.append(sampled[request.place][request.computed % self.sampled.kept])
                if request.finished:
                    break
            for index in () if request.spans else range(first, request.computed // self.block_size):
                self.pool.publish(request.blocks[index], request.key(index, self.block_size))
            if request.finished or request.computed >= self.suspects.get(request, 0):
                self.suspects.pop(request, None)
            if request.finished:
                self._leave(request)
        self.runs.popleft()


if __name__ == "__main__":
    raise SystemExit("engine.py is a module; run generate.py beside it, which is an engine for text or token ids")
