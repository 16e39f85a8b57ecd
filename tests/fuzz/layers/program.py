"""A program: random steps of a random batch through random layers, each output compared with float64 attention."""

from __future__ import annotations

import random
from typing import Any

import torch
from fuzz.layers.caches import nobodys
from fuzz.layers.captured_layers import CapturedLayers
from fuzz.layers.compared import Comparer, Step
from fuzz.layers.compositions import Compositions
from fuzz.layers.encoders import Encoders
from fuzz.layers.list_steps import ListSteps
from fuzz.layers.model import Model, Result
from fuzz.layers.over_ranks import OverRanks
from fuzz.layers.parts import Part, Parts
from fuzz.layers.requests import Requests
from fuzz.layers.settings import MAX_ENCODER, MAX_REQS, Settings, Tested
from fuzz.layers.states import RecurrentLayer
from torch import Tensor

from attncore import MetadataBuilder


class Program(Model):
    """Steps of the persistent builder."""

    def __init__(self, draw: random.Random, tested: Tested) -> None:
        super().__init__(draw, tested)
        settings = self.settings
        self.requests = Requests(draw, settings)
        self.held = self.requests.held
        self.rejected = self._drawn_verdicts()
        self.verdicts: dict[str, int] = {}
        """Rejected tokens of the last step, of which the host does not know."""
        self.builder = MetadataBuilder(
            self.requests.batch, self.backends if len(self.backends) > 1 else self.backends["g0"],
            max_num_batched_tokens=2 * settings.sizes.model_len, max_num_encoder_tokens=MAX_REQS * MAX_ENCODER,
            decode_threshold=settings.threshold, draft_trees=settings.trees,
            transport="copy" if tested.on_device else settings.transport,
            **({"num_rejected": self.rejected} if self.rejected is not None else {}),
        )  # fmt: skip
        self.parts = Parts(draw, settings, self.requests, self.backends, self.numbers)
        self.parts.more += [ListSteps(self.parts).of]
        Compositions(self.parts, tested, self.builder)
        OverRanks(self.parts, tested)
        self.recurrent = RecurrentLayer(MAX_REQS + 3)
        self.twice: dict[int, CapturedLayers] = {}
        """By bucket, two steps ahead in one graph."""
        self._capture()
        self.comparer = Comparer(draw, settings, self.held, self._scaled)
        self.encoders = Encoders(draw, settings, self.backends, self.numbers, tested)

    def _limit(self, settings: Settings) -> None:
        """It has all."""

    def _capture(self) -> None:
        level, draw = self.tested.cuda_graph, self.draw
        if level == "never" or draw.random() < 0.4 or any(layer.whole for layer in self.settings.layers):
            return
        rows = draw.randint(1, MAX_REQS)
        each = 1 if level == "uniform_decode" else draw.choice([1, draw.randint(1, self.settings.threshold)])
        layers = list(zip(self.settings.layers, self.impls, strict=True))
        with_lse = "lse" in self.tested.features and draw.random() < 0.5
        metadata = self.builder.capture(rows, each)
        given = metadata, layers, self.caches, self.settings, self.numbers, each, with_lse
        self.captured[rows] = CapturedLayers(*given)
        if each == 1 and not self.settings.states and self._runs_ahead(rows):
            self.twice[rows] = CapturedLayers(*given, self.captured[rows])
        if level == "always" and not self.settings.states and draw.random() < 0.5:
            tokens = draw.choice([8, 24])
            metadata = self.builder.capture(rows, num_tokens=tokens)
            self.captured[rows, tokens] = CapturedLayers(
                metadata, layers, self.caches, self.settings, self.numbers, None, with_lse
            )

    def _runs_ahead(self, rows: int) -> bool:
        """Whether steps of a size may be made of one another on the device."""
        try:
            steps = self.builder.run_ahead(1, bucket=rows)
        except ValueError as refused:
            if not str(refused).startswith("run_ahead"):
                raise
            return False
        steps.stop()
        return True

    def _drawn_verdicts(self) -> Tensor | None:
        """Where drafts are judged on the device: sometimes, where backends run by bounds of lengths."""
        settings, specs = self.settings, [backend.spec for backend in self.backends.values()]
        alone = settings.trees or settings.spans or settings.states
        if alone or any(spec is None or spec.host_lengths == "exact" for spec in specs) or self.draw.random() < 0.6:
            return None
        settings.transport = "copy"
        return torch.zeros(MAX_REQS, dtype=torch.int32, device=self.backends["g0"].config.device)

    def _tell_verdicts(self) -> None:
        """The host hears what was rejected."""
        held, batch = self.held, self.requests.batch
        batch.rollback_many({name: count for name, count in self.verdicts.items() if name in batch})
        for name in self.verdicts.keys() & held.keys():
            held[name].ahead = 0
        self.verdicts = {}

    def step(self) -> None:
        requests = self.requests
        overlapped = bool(self.verdicts) and self.draw.random() < 0.7
        if overlapped:
            requests.arrive()
        else:
            self._tell_verdicts()
            requests.change()
        self._change_layers()
        self._move_blocks()
        bucket = self.draw.choice([None, *self.captured])
        if isinstance(bucket, int) and not overlapped and self.draw.random() < 0.5 and self._run_ahead(bucket):
            return
        scheduled = self._scheduled(bucket)
        trees = {} if isinstance(bucket, tuple) else self._trees(scheduled)
        metadata = self.builder.build(
            scheduled, bucket=bucket, overlapped=overlapped, **({"trees": trees} if trees else {})
        )
        if self.draw.random() < 0.5:  # while the step runs, or behind it
            self._tell_verdicts()
        groups = dict(metadata.groups)
        step = self._new_step({name: scheduled[name] for name in metadata.req_ids}, trees)
        queries = self._queries(step)
        if bucket is None:
            whole = Part(groups, [*range(len(step.tokens))])
            found = self._eager(whole, step, queries, bounded=overlapped)
        else:
            whole = Part(groups, [*range(len(step.tokens))])
            found = self._replayed(bucket, metadata, whole, step, queries)
        self._finish(step, metadata, queries, found, replayed=bucket is not None)
        self._tell_verdicts()
        if self.rejected is not None:
            self._judge(step)

    def _judge(self, step: Step) -> None:
        """The sampler rejects drafts, on the device."""
        wrong = {
            name: self.draw.randint(0, count - 1) if count <= self.settings.threshold else 0
            for name, count in step.counts.items()
        }
        assert self.rejected is not None
        self.rejected[: len(wrong)] = torch.tensor([*wrong.values()], dtype=torch.int32)
        for name, count in wrong.items():
            request = self.held[name]
            request.keep(request.computed - count)
            request.ahead = count
        self.verdicts = wrong

    def _run_ahead(self, bucket: int) -> bool:
        """Steps of one token each that the device makes of one another; False where they were refused."""
        held, draw = self.held, self.draw
        count = draw.randint(1, 4)
        ready = [
            name for name, request in held.items()
            if request.computed and request.computed + count <= self.settings.sizes.model_len
            and (request.encoded or not request.encoder)
            and not any(start < request.computed + count and stop > request.computed for start, stop in request.spans)
        ][:bucket]  # fmt: skip
        if self.captured[bucket].each != 1 or not ready:
            return False
        for name in ready:
            self.requests.make_room(name, held[name].computed + count)
        resting = {name: 0 for name in held if name not in ready}
        try:
            steps = self.builder.run_ahead(count, bucket=bucket, scheduled=resting)
        except ValueError as refused:
            if not str(refused).startswith("run_ahead"):
                raise
            return False
        wanted, index = draw.choice([count, count, draw.randint(1, count)]), 0
        while index < wanted:
            both = bucket in self.twice and index + 1 < wanted and draw.random() < 0.7
            index += 2 if both else 1
            if both:
                self._run_both(bucket, steps)
                continue
            step = self._new_step(dict.fromkeys(steps.first.req_ids, 1), {})
            queries = self._queries(step)
            whole = Part({}, [*range(len(step.tokens))])
            found = self._replayed(bucket, steps, whole, step, queries)
            self._finish(step, steps[index - 1] if self.settings.states else None, queries, found, replayed=True)
        if steps.left:
            assert steps.stop() == index
        return True

    def _run_both(self, bucket: int, steps: Any) -> None:
        """The next two steps ahead in one graph."""
        made, queries = [], []
        for index in range(2):
            counts = dict.fromkeys(steps.first.req_ids, 1)
            made.append(self._new_step(counts, {}))
            queries.append(self._queries(made[-1]))
            if index == 0:
                for name in counts:
                    self.held[name].computed += 1
        for name in counts:
            self.held[name].computed -= 1
        found = self.twice[bucket].run_both(steps, queries, [self._written_by(step) for step in made])
        for step, asked, returned in zip(made, queries, found, strict=True):
            whole = Part({}, [*range(len(step.tokens))])
            results = [(number, whole, *one) for number, one in enumerate(returned)]
            self._finish(step, None, asked, results, replayed=True)

    def _finish(self, step: Step, metadata: Any, queries: list[Tensor], found: list[Result], *, replayed: bool) -> None:
        """Compares what layers gave, and goes on behind the step."""
        if self.settings.states:
            self.recurrent.check(
                self.draw, self.held, step, metadata, [] if replayed else [part for _, part, *_ in found]
            )
        self._remember(step)
        for number, part, output, sums in found:
            self.comparer.compare(number, part, queries[number], step, output, sums)
        self._go_on(step)
        if not self.tested.lags:
            self.comparer.check()

    def _move_blocks(self) -> None:
        for group, block, copied in self.requests.moved:
            each, backend = self._kernel_blocks(group), self.backends[group]
            caches = [cache for (of_cache, _), cache in self.caches.items() if of_cache == group]
            if copied is None:
                for cache in caches:
                    for view in backend.kv_cache_views(cache):
                        nobodys(view[block * each : (block + 1) * each], finite=self.tested.finite)
            else:
                backend.copy_blocks(caches, [[block * each + k, copied * each + k] for k in range(each)])
        self.requests.moved.clear()

    def _scheduled(self, bucket: Any) -> dict[str, int]:
        if bucket is None:
            return self.requests.scheduled(2 * self.settings.sizes.model_len)
        rows, most = bucket if isinstance(bucket, tuple) else (bucket, 10**6)
        scheduled = self.requests.scheduled(most, self.captured[bucket].each)
        running = [name for name, count in scheduled.items() if count]
        held = self.held
        for name in running:
            if held[name].encoder and not held[name].encoded:
                scheduled[name] = 0  # encoder tokens do not fit a captured size
        running = [name for name in running if scheduled[name]]
        return scheduled | dict.fromkeys(running[rows:], 0)

    def _trees(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        """Parents of drafts, of some of the requests that run as decodes of several tokens behind a first token."""
        return {
            name: [self.draw.randint(-1, draft - 1) for draft in range(count - 1)]
            for name, count in scheduled.items()
            if self.settings.trees and 1 < count <= self.settings.threshold and self.draw.random() < 0.6
        }

    def _eager(self, whole: Part, step: Step, queries: list[Tensor], *, bounded: bool) -> list[Result]:
        """Runs the layers over the step's parts."""
        parts = [whole]
        if step.tokens:
            parts = self.parts.of(whole, step.counts, trees=bool(step.trees), bounded=bounded)
        layers = range(len(self.impls))
        planned = any(backend.has_plan for backend in self.backends.values())
        if planned or self.draw.random() < 0.5:  # a backend may keep one plan of eager steps
            runs = [(number, part) for part in parts for number in layers]
        else:
            runs = [(number, part) for number in layers for part in parts]
        found: list[Result] = []
        at: Part | None = whole
        for number, part in runs:
            if self.settings.layers[number].whole and not self._is_whole(part, step):
                continue
            if planned and part is not at:
                for group, metadata in part.metadata.items():
                    self.backends[group].plan(metadata)
            at = part if part.attend is None else None  # which plans steps of its own
            if number == 0 and part.attend is None:
                self.encoders.check(part, step, self.held)
            found.append((number, part, *self._run(number, part, queries[number], step)))
        return found

    def _go_on(self, step: Step) -> None:
        """What an engine does behind a step: it keeps a path of each tree, and moves its keys together."""
        held = self.held
        for name, count in step.counts.items():
            held[name].computed += count
        for name in step.encoded:
            held[name].encoded = True
        paths = {name: self._path(parents) for name, parents in step.trees.items()}
        if not paths:
            return
        moves = self.builder.keep_paths(paths)
        for (group, _), cache in self.caches.items():
            if group == "cross":
                continue
            self.backends[group].move_slots([cache], moves[group])
        for name, path in paths.items():
            request = held[name]
            base = request.computed - step.counts[name]
            kept = [*range(base + 1), *(base + 1 + draft for draft in path)]
            for key, written in request.written.items():
                if key[0] != "cross":
                    request.written[key] = written[0][kept], written[1][kept]
            request.computed = len(kept)

    def _path(self, parents: list[int]) -> list[int]:
        """Drafts from the root on, each the child of the one before."""
        path, at = [], -1
        while (after := [draft for draft, parent in enumerate(parents) if parent == at]) and self.draw.random() < 0.7:
            at = self.draw.choice(after)
            path.append(at)
        return path
