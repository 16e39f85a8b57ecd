"""A program: random steps of a random batch through random layers, each output compared with float64 attention."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from fuzz.layers.caches import Numbers, new_cache, nobodys
from fuzz.layers.captured_layers import CapturedLayers
from fuzz.layers.compared import Comparer, Step, Token
from fuzz.layers.compositions import Compositions
from fuzz.layers.encoders import Encoders
from fuzz.layers.list_steps import ListSteps
from fuzz.layers.over_ranks import OverRanks
from fuzz.layers.parts import Part, Parts, Run
from fuzz.layers.requests import Requests
from fuzz.layers.settings import (
    MAX_ENCODER,
    MAX_REQS,
    Layer,
    Settings,
    Tested,
    draw_first,
    draw_groups,
    draw_layers,
)
from fuzz.layers.states import RecurrentLayer
from torch import Tensor

import attncore
from attncore import MetadataBuilder

Scale = float | Tensor
Result = tuple[int, Part, Tensor, Tensor | None]
"""A layer's number, the part that it ran over, its output and perhaps log-sum-exp."""


class Program:
    def __init__(self, draw: random.Random, tested: Tested) -> None:
        self.draw, self.tested = draw, tested
        self.settings = settings = draw_first(draw, tested)
        draw_groups(draw, settings, tested)
        draw_layers(draw, settings, tested)
        self._make_layers()
        self.requests = Requests(draw, settings)
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
        self.captured: dict[Any, CapturedLayers] = {}
        """By bucket."""
        self.twice: dict[int, CapturedLayers] = {}
        """By bucket, two steps ahead in one graph."""
        self._capture()
        self.comparer = Comparer(draw, settings, self.requests.held, self._scaled)
        self.encoders = Encoders(draw, settings, self.backends, self.numbers, tested)

    def _make_layers(self) -> None:
        """Backends, caches, scales and layers of the settings."""
        settings = self.settings
        self.backends = {group.name: self.tested.make(settings.of(group.name)) for group in settings.groups}
        self.numbers = Numbers(self.draw, self.backends["g0"].config)
        self.caches: dict[tuple[str, int], Any] = {}
        self.scales: dict[tuple[str, int], tuple[Scale, Scale]] = {}
        self.impls = []
        for number, layer in enumerate(settings.layers):
            backend, each = self.backends[layer.group], self._kernel_blocks(layer.group)
            if (layer.group, layer.cache) not in self.caches:
                made = new_cache(self.draw, backend, settings.of(layer.group).num_blocks * each, self.tested)
                self.caches[layer.group, layer.cache] = made
                self.scales[layer.group, layer.cache] = self._drawn_scales(settings.of(layer.group))
            self.impls.append(self._made_layer(number, layer))

    def _made_layer(self, number: int, layer: Layer) -> Any:
        """Without soft cap, slopes and sinks where the backend has not all of them together."""
        scales = dict(zip(("k_scale", "v_scale"), self.scales[layer.group, layer.cache], strict=True))
        make = self.backends[layer.group].impl
        try:
            return make(f"layers.{number}", **scales, **layer.features)
        except ValueError:
            for name in ("logits_soft_cap", "alibi_slopes", "sinks"):
                layer.features.pop(name, None)
            return make(f"layers.{number}", **scales, **layer.features)

    def _kernel_blocks(self, group: str) -> int:
        of_group = next(one for one in self.settings.groups if one.name == group)
        return int(of_group.block_size // self.settings.of(group).block_size)

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

    def _drawn_scales(self, settings: Settings) -> tuple[Scale, Scale]:
        """Of keys and values, powers of 2; those of one kind that the backend has. Other caches than fp8 have none."""
        heads = settings.kv_heads
        kinds = {"kv_scales": None, "kv_scales_on_device": 1, "kv_scales_per_head": heads}
        if not settings.cache_dtype.startswith("fp8") or not (able := self.tested.features_of(settings) & kinds.keys()):
            return 1.0, 1.0
        count = kinds[self.draw.choice(sorted(able))]
        numbers = [[self.draw.choice([0.25, 0.5, 1.0, 2.0]) for _ in range(count or 1)] for _ in "kv"]
        keys, values = (row[0] if count is None else torch.tensor(row) for row in numbers)
        return keys, keys if settings.latent else values

    def _change_layers(self) -> None:
        """What an engine does to layers between steps: other weights, other memory."""
        for number, layer in enumerate(self.settings.layers):
            if "sinks" in layer.features and self.draw.random() < 0.1:
                layer.features["sinks"] = [
                    self.draw.choice([-1.0, 0.5, 2.0, -math.inf]) for _ in layer.features["sinks"]
                ]
                self.impls[number].set_sinks(layer.features["sinks"])
        for key, cache in self.caches.items():
            if self.draw.random() < 0.1 and not self.captured:  # a graph holds its addresses
                self.caches[key] = cache.clone() if isinstance(cache, Tensor) else tuple(one.clone() for one in cache)
            if self.draw.random() < 0.1 and not self.captured:
                self.caches[key] = self._in_another_form(key[0], cache)
            if self.draw.random() < 0.1 and self.settings.of(key[0]).cache_dtype.startswith("fp8"):
                self.scales[key] = self._drawn_like(self.scales[key], key[0])
                for number, layer in enumerate(self.settings.layers):
                    if (layer.group, layer.cache) == key:
                        self.impls[number].set_scales(*self.scales[key])

    def _in_another_form(self, group: str, cache: Any) -> Any:
        backend = self.backends[group]
        blocks = len(backend.kv_cache_views(cache)[0])
        made = new_cache(self.draw, backend, blocks, self.tested)
        backend.swap_blocks(cache, made, [[block, block] for block in range(blocks)])
        return made

    def _drawn_like(self, scales: tuple[Scale, Scale], group: str) -> tuple[Scale, Scale]:
        """The same scales times 2, or as they are: what is in the cache is read with the new ones."""
        keys, values = (scale * self.draw.choice([1.0, 2.0]) for scale in scales)
        stays = self.captured and isinstance(keys, float)  # in the graphs that were captured with it
        if stays or "kv_scales" not in self.tested.features_of(self.settings.of(group)):
            return scales
        return keys, keys if self.settings.of(group).latent else values

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.tested.lags and self.draw.random() < 0.7:
                torch.cuda._sleep(self.draw.choice([10**5, 10**6, 10**7]))  # type: ignore[no-untyped-call]
            self.step()
        self.comparer.check()

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
        held, batch = self.requests.held, self.requests.batch
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
            request = self.requests.held[name]
            request.keep(request.computed - count)
            request.ahead = count
        self.verdicts = wrong

    def _queries(self, step: Step) -> list[Tensor]:
        found = []
        for layer in self.settings.layers:
            mine = self.settings.of(layer.group)
            found.append(self.numbers.rows(len(step.tokens), mine.heads, mine.head_size, mine))
        return found

    def _replayed(self, bucket: Any, built: Any, whole: Part, step: Step, queries: list[Tensor]) -> list[Result]:
        returned = self.captured[bucket].run(built, queries, self._written_by(step))
        return [(number, whole, *one) for number, one in enumerate(returned)]

    def _written_by(self, step: Step) -> dict[tuple[str, int], list[Tensor]]:
        """Keys and values that layers are given, by group and cache."""
        return {
            (layer.group, layer.cache): self._scaled(layer, step.new[layer.group, layer.cache])
            for layer in self.settings.layers
        }

    def _run_ahead(self, bucket: int) -> bool:
        """Steps of one token each that the device makes of one another; False where they were refused."""
        held, draw = self.requests.held, self.draw
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
                    self.requests.held[name].computed += 1
        for name in counts:
            self.requests.held[name].computed -= 1
        found = self.twice[bucket].run_both(steps, queries, [self._written_by(step) for step in made])
        for step, asked, returned in zip(made, queries, found, strict=True):
            whole = Part({}, [*range(len(step.tokens))])
            results = [(number, whole, *one) for number, one in enumerate(returned)]
            self._finish(step, None, asked, results, replayed=True)

    def _finish(self, step: Step, metadata: Any, queries: list[Tensor], found: list[Result], *, replayed: bool) -> None:
        """Compares what layers gave, and goes on behind the step."""
        if self.settings.states:
            self.recurrent.check(
                self.draw, self.requests.held, step, metadata, [] if replayed else [part for _, part, *_ in found]
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
        held = self.requests.held
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
                self.encoders.check(part, step, self.requests.held)
            found.append((number, part, *self._run(number, part, queries[number], step)))
        return found

    def _is_whole(self, part: Part, step: Step) -> bool:
        """Whether each row is all that its request has so far: layers without a cache refuse others."""
        names = [step.tokens[index].name for index in part.tokens]
        return part.chunk is None and all(
            names.count(name) == step.counts[name] and not self.requests.held[name].computed for name in set(names)
        )

    def _new_step(self, counts: dict[str, int], trees: dict[str, list[int]]) -> Step:
        tokens, encoded = [], {}
        for name, count in counts.items():
            request = self.requests.held[name]
            base = request.computed
            depths, seen = [0], [{0}]
            for draft, parent in enumerate(trees.get(name, ())):
                depths.append(depths[parent + 1] + 1)
                seen.append(seen[parent + 1] | {draft + 1})
            for index in range(count):
                mine = frozenset(base + one for one in seen[index]) if name in trees else frozenset()
                position = base + (depths[index] if name in trees else index)
                tokens.append(Token(name, base + index, position, mine))
            if request.encoder and not request.encoded:
                encoded[name] = request.encoder
        new = {}
        for group, cache in self.caches:
            settings = self.settings.of(group)
            rows = sum(encoded.values()) if group == "cross" else len(tokens)
            keys = self.numbers.rows(rows, settings.kv_heads, settings.head_size, settings)
            values = self.numbers.rows(rows, settings.kv_heads, settings.value_size, settings)
            new[group, cache] = keys, keys[..., : settings.value_size] if settings.latent else values
        return Step(counts, trees, tokens, encoded, new)

    def _run(self, number: int, part: Part, queries: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Output and perhaps log-sum-exp of a layer for the tokens of a part."""
        layer, impl, draw, numbers = self.settings.layers[number], self.impls[number], self.draw, self.numbers
        metadata = part.metadata[layer.group]
        cache = self.caches[layer.group, layer.cache]
        count = len(part.tokens)
        total = max(metadata.num_tokens, count) + draw.choice([0, 0, 0, 2])
        query = numbers.given(queries[part.tokens], total)
        keys, values = self._keys(layer, part, step, total)
        if part.attend is not None:
            given = [None if one is None else one[:count] for one in (query, keys, values)]
            composed = part.attend(Run(number, layer, impl, metadata, *given, cache))
            if composed is not None:
                return tuple(None if one is None else one[:count].clone() for one in composed)
        write = layer.writes
        if write and draw.random() < 0.3:
            impl.write_cache(keys, values, cache, metadata)
            write = False
        needed = layer.whole or not self._has_tables(part, step)
        if not write and not needed and draw.random() < 0.7:
            keys = values = None
        given = None
        if draw.random() < 0.4:
            mine = self.settings.of(layer.group)
            given = numbers.room(total, mine.heads, mine.value_size, fill=7.0)
        run = impl.forward_with_lse if "lse" in self.tested.features and draw.random() < 0.4 else impl.forward
        if run == impl.forward and draw.random() < 0.3:
            run = self._by_operator(number)
        returned = run(query, keys, values, cache, metadata, given, write=write)
        found, sums = returned if isinstance(returned, tuple) else (returned, None)
        if given is not None:
            assert found is given
            self._check_beside(given)
        return found[:count].clone(), None if sums is None else sums[:count].clone()

    @staticmethod
    def _check_beside(output: Tensor) -> None:
        """That nothing is written beside an output that is a part of a wider tensor."""
        whole = output._base if output._base is not None else output
        mine = torch.zeros(whole.untyped_storage().size() // whole.element_size(), dtype=torch.bool)
        mine.as_strided(output.shape, output.stride(), output.storage_offset()).fill_(True)
        flat = whole.as_strided(mine.shape, (1,), 0).cpu()
        assert (flat[~mine] == 7.0).all(), "an output was written beside its rows"

    def _by_operator(self, number: int) -> Any:
        """``impl.forward`` as the operator calls it, which finds the layer by its name."""
        impl, name = self.impls[number], f"layers.{number}"
        settings = self.settings.of(self.settings.layers[number].group)

        def forward(
            query: Tensor, keys: Any, values: Any, cache: Any, metadata: Any, output: Any, *, write: bool
        ) -> Tensor:
            of_layer = {name: metadata} if self.draw.random() < 0.5 else metadata
            if isinstance(cache, tuple) and self.draw.random() < 0.3:
                cache = list(cache)
            with attncore.forward_context(of_layer, {name: impl}):
                size = None if settings.value_size == settings.head_size else settings.value_size
                return attncore.attention(
                    query, keys, values, cache, layer_name=name, head_size_v=size, output=output, write=write
                )

        return forward

    def _has_tables(self, part: Part, step: Step) -> bool:
        """Whether keys lie in the cache for each token: not of prompts of the list builder that have no context, nor of
        tokens that its window leaves out."""
        names = {step.tokens[index].name for index in part.tokens}
        if part.encodes & names:
            return False
        if "listed" not in part.how:
            return True
        if {"masked", "local"} & {*part.how}:  # a chunk without context is as a prompt without one
            return False
        return all(self.requests.held[name].computed for name in names)

    def _keys(self, layer: Layer, part: Part, step: Step, total: int) -> tuple[Tensor | None, Tensor | None]:
        """What a layer is handed of the step's keys and values; a latent cache takes no values."""
        keys, values = self._scaled(layer, step.new[layer.group, layer.cache])
        if layer.group == "cross":
            rows = self._encoder_rows(layer, part, step, keys, values)
            return self.numbers.given(rows[0]), self.numbers.given(rows[1])
        keys, values = (self.numbers.given(one[part.tokens], total) for one in (keys, values))
        return keys, None if self.settings.of(layer.group).latent else values

    def _encoder_rows(self, layer: Layer, part: Part, step: Step, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Of the part's requests whose encoder runs in it: ``keys`` and ``values`` are those of the whole step."""
        firsts, at = {}, 0
        for name, count in step.encoded.items():
            firsts[name], at = at, at + count
        found = [(keys[:0], values[:0])]
        for name in dict.fromkeys(step.tokens[index].name for index in part.tokens):
            if name in firsts:
                found.append(tuple(one[firsts[name] : firsts[name] + step.encoded[name]] for one in (keys, values)))
            elif name in part.encodes:
                written = self.requests.held[name].written[layer.group, layer.cache]
                found.append(tuple(self._scaled(layer, tuple(one.to(keys.dtype) for one in written))))
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def _scaled(self, layer: Layer, held: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Keys and values of what a cache holds."""
        scales = self.scales[layer.group, layer.cache]
        return [
            rows * torch.as_tensor(scale, dtype=rows.dtype).reshape(1, -1, 1)
            for rows, scale in zip(held, scales, strict=True)
        ]

    def _remember(self, step: Step) -> None:
        """Adds the step's keys and values to the histories of its requests, as the caches hold them."""
        for (group, cache), new in step.new.items():
            at = 0
            for name, count in (step.encoded if group == "cross" else step.counts).items():
                written = self.requests.held[name].written
                mine = [one[at : at + count].double() for one in new]
                if group != "cross" and (group, cache) in written:
                    mine = [torch.cat(both) for both in zip(written[group, cache], mine, strict=True)]
                written[group, cache] = mine[0], mine[1]
                at += count

    def _go_on(self, step: Step) -> None:
        """What an engine does behind a step: it keeps a path of each tree, and moves its keys together."""
        held = self.requests.held
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
