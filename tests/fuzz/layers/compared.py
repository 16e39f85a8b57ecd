"""What layers gave for a step, beside float64 attention over the histories of its requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from fuzz.layers.attention import attend
from fuzz.layers.parts import Part
from fuzz.layers.requests import Request
from fuzz.layers.settings import Layer, Settings
from torch import Tensor

MOST_COMPARED = 20
"""Tokens of a part whose results are compared: the first, the last, and some between."""


class Token(NamedTuple):
    """A query of a step, whose key is at ``place`` of its request's ``written``."""

    name: str
    place: int
    position: int
    seen: frozenset[int]
    """The step's places that it sees in a draft tree; empty: those up to its own."""


class Step(NamedTuple):
    counts: dict[str, int]
    """Tokens of each request, in the order of rows."""
    trees: dict[str, list[int]]
    tokens: list[Token]
    encoded: dict[str, int]
    """Encoder tokens of the rows whose keys are computed in this step."""
    new: dict[tuple[str, int], tuple[Tensor, Tensor]]
    """By group and cache: the keys and values of the step's tokens (cross: of its encoder tokens), as the cache holds
    them: without scales.
    """


class Comparer:
    """``held``: the requests by name. ``scaled`` gives the keys and values of what a layer's cache holds."""

    def __init__(
        self, draw: random.Random, settings: Settings, held: Mapping[str, Request],
        scaled: Callable[[Layer, tuple[Tensor, Tensor]], list[Tensor]],
    ) -> None:  # fmt: skip
        self.draw, self.settings, self.held, self.scaled = draw, settings, held, scaled
        self.compared: list[tuple[Tensor, Tensor, Tensor, str]] = []
        """Found, expected and allowed numbers of which the device may still be computing the first, and of what."""

    def compare(
        self, number: int, part: Part, queries: Tensor, step: Step, output: Tensor, sums: Tensor | None
    ) -> None:
        layer, allowed = self.settings.layers[number], self.settings.tolerance
        mine = self.settings.of(layer.group)
        rounding = mine.sizes.rounding if mine.cache_dtype.startswith("fp8") else 0.0
        if part.attend is not None:  # each part that is merged was rounded
            rounding = max(rounding, allowed / 4)
        places = range(len(part.tokens))
        if len(places) > MOST_COMPARED:
            places = [*places[:4], *self.draw.sample(places[4:-4], MOST_COMPARED - 8), *places[-4:]]
        for place in places:
            index = part.tokens[place]
            expected, its_sums, magnitudes = self._expected(layer, part, queries[index], step.tokens[index], step)
            for found, wanted, off in ((output, expected, rounding * magnitudes), (sums, its_sums, 0.0)):
                if found is not None:
                    about = (
                        f"layer {number} {layer}, token {index} {step.tokens[index]}, part {part.how} of {step.counts}"
                    )
                    within = allowed * (1 + wanted.abs()) + off
                    self.compared.append((found[place], wanted, within, about))

    def check(self) -> None:
        """Compares what was computed so far."""
        for found, wanted, within, about in self.compared:
            mine = found.cpu().double()
            mine = torch.where(mine.isinf(), torch.inf, mine)  # no key is seen: of either sign
            wanted = torch.where(wanted.isinf(), torch.inf, wanted.double())
            assert ((mine == wanted) | ((mine - wanted).abs() <= within)).all(), (
                f"{about}: {mine.flatten()[:4].tolist()} found, {wanted.flatten()[:4].tolist()} expected"
            )
        self.compared.clear()

    def _expected(
        self, layer: Layer, part: Part, query: Tensor, token: Token, step: Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        request = self.held[token.name]
        masks = "attn_type", "sliding_window"
        features = {name: value for name, value in layer.features.items() if name not in masks}
        of_nothing = [torch.zeros(0, *one.shape[1:], dtype=torch.float64) for one in step.new[layer.group, layer.cache]]
        keys, values = self.scaled(layer, request.written.get((layer.group, layer.cache), of_nothing))
        if layer.group == "cross":
            every = torch.ones(len(keys), dtype=torch.bool)
            return attend(query.double(), keys, values, every, torch.zeros(len(keys)), **features)
        places = torch.arange(len(keys))
        visible, positions = places <= token.place, places.clone()
        if token.seen:
            for one in (one for one in step.tokens if one.name == token.name):
                positions[one.place] = one.position
                visible[one.place] = one.place in token.seen
        distances = (token.position - positions).abs()
        if (window := layer.features.get("sliding_window")) is not None:
            visible &= distances < window
        for start, stop in request.spans:
            if start <= token.place < stop:
                visible |= (places >= start) & (places < stop)
        if part.new:
            visible &= places >= request.computed
        if layer.whole:
            mine = {step.tokens[index].place for index in part.tokens if step.tokens[index].name == token.name}
            visible = torch.tensor([place in mine for place in places.tolist()])
            if window is not None:
                visible &= distances < window
        if part.chunk is not None:
            visible &= places // part.chunk == token.place // part.chunk
        return attend(query.double(), keys, values, visible, distances, **features)
