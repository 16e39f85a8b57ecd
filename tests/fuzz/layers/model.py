"""The layers of a program: their backends, caches and scales, and what they are handed in a step."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from typing import Any

import torch
from fuzz.layers.caches import Numbers, new_cache
from fuzz.layers.captured_layers import CapturedLayers
from fuzz.layers.compared import Step, Token
from fuzz.layers.parts import Part, Run
from fuzz.layers.requests import Request
from fuzz.layers.settings import Layer, Settings, Tested, draw_first, draw_groups, draw_layers
from torch import Tensor

import attncore

Scale = float | Tensor
Result = tuple[int, Part, Tensor, Tensor | None]
"""A layer's number, the part that it ran over, its output and perhaps log-sum-exp."""


class Model(ABC):
    """``held``: the requests by name."""

    def __init__(self, draw: random.Random, tested: Tested) -> None:
        self.draw, self.tested = draw, tested
        self.settings = draw_first(draw, tested)
        draw_groups(draw, self.settings, tested)
        self._limit(self.settings)
        draw_layers(draw, self.settings, tested)
        self._make_layers()
        self.held: dict[str, Request] = {}
        self.captured: dict[Any, CapturedLayers] = {}
        """By bucket."""

    @abstractmethod
    def _limit(self, settings: Settings) -> None:
        """Takes out of what was drawn for groups what a program has not."""

    @abstractmethod
    def step(self) -> None:
        """Changes requests and layers, runs a step, and has what layers gave compared."""

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

    def _queries(self, step: Step) -> list[Tensor]:
        found = []
        for layer in self.settings.layers:
            mine = self.settings.of(layer.group)
            found.append(self.numbers.rows(len(step.tokens), mine.heads, mine.head_size, mine))
        return found

    def _new_step(self, counts: dict[str, int], trees: dict[str, list[int]]) -> Step:
        tokens, encoded = [], {}
        for name, count in counts.items():
            request = self.held[name]
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

    def _replayed(self, bucket: Any, built: Any, whole: Part, step: Step, queries: list[Tensor]) -> list[Result]:
        returned = self.captured[bucket].run(built, queries, self._written_by(step))
        return [(number, whole, *one) for number, one in enumerate(returned)]

    def _written_by(self, step: Step) -> dict[tuple[str, int], list[Tensor]]:
        """Keys and values that layers are given, by group and cache."""
        return {
            (layer.group, layer.cache): self._scaled(layer, step.new[layer.group, layer.cache])
            for layer in self.settings.layers
        }

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

    def _is_whole(self, part: Part, step: Step) -> bool:
        """Whether each row is all that its request has so far: layers without a cache refuse others."""
        names = [step.tokens[index].name for index in part.tokens]
        return part.chunk is None and all(
            names.count(name) == step.counts[name] and not self.held[name].computed for name in set(names)
        )

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
        return all(self.held[name].computed for name in names)

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
                written = self.held[name].written[layer.group, layer.cache]
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
                written = self.held[name].written
                mine = [one[at : at + count].double() for one in new]
                if group != "cross" and (group, cache) in written:
                    mine = [torch.cat(both) for both in zip(written[group, cache], mine, strict=True)]
                written[group, cache] = mine[0], mine[1]
                at += count
