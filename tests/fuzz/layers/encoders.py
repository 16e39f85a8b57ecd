"""Layers of an encoder, whose tokens see each other both ways, over the encoder tokens that a part of a step runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from fuzz.layers.attention import attend
from fuzz.layers.caches import Numbers
from fuzz.layers.compared import Step
from fuzz.layers.parts import Part
from fuzz.layers.requests import Request
from fuzz.layers.settings import Settings, Tested, draw_features

from attncore import KVCacheGroup


class Encoders:
    def __init__(
        self, draw: random.Random, settings: Settings, backends: Mapping[str, Any], numbers: Numbers, tested: Tested
    ) -> None:
        self.draw, self.settings, self.numbers, self.tested = draw, settings, numbers, tested
        self.layers: list[tuple[dict[str, Any], Any]] = []
        if not settings.groups[-1].cross or "encoder" not in tested.features:
            return
        as_decoder = KVCacheGroup("cross", settings.block_size)
        for number in range(2):
            features = draw_features(draw, settings, as_decoder, tested.features, True)
            try:
                made = backends["cross"].impl(f"encoder.{number}", **features, attn_type="encoder")
            except ValueError:  # not all of them together
                features = {"scale": features["scale"]}
                made = backends["cross"].impl(f"encoder.{number}", **features, attn_type="encoder")
            self.layers.append((features, made))

    def check(self, part: Part, step: Step, held: Mapping[str, Request]) -> None:
        """Runs the layers over a part's encoder tokens, and compares all of them."""
        names = list(dict.fromkeys(step.tokens[index].name for index in part.tokens))
        if "listed" in part.how and len(names) < len(step.counts):
            return  # views of the list builder have the encoder tokens of all rows
        running = [name for name in names if name in step.encoded or name in part.encodes]
        count = sum(held[name].encoder for name in running)
        for features, impl in self.layers:
            if not count or self.draw.random() < 0.5:
                continue
            mine, numbers, draw = self.settings, self.numbers, self.draw
            total = count + draw.choice([0, 0, 2])
            queries = numbers.rows(count, mine.heads, mine.head_size, mine)
            keys = numbers.rows(count, mine.kv_heads, mine.head_size, mine)
            values = numbers.rows(count, mine.kv_heads, mine.value_size, mine)
            given = [numbers.given(one, total) for one in (queries, keys, values)]
            output = numbers.room(total, mine.heads, mine.value_size, fill=7.0) if draw.random() < 0.3 else None
            with_lse = "lse" in self.tested.features and draw.random() < 0.4
            run = impl.forward_with_lse if with_lse else impl.forward
            returned = run(*given, None, part.metadata["cross"], output, write=draw.random() < 0.8)
            found, sums = returned if with_lse else (returned, None)
            at = 0
            for name in running:
                places = torch.arange(held[name].encoder)
                rows = slice(at, at + len(places))
                for place in places.tolist():
                    distances = (places - place).abs()
                    visible = distances < features.get("sliding_window", 10**6)
                    wanted = attend(
                        queries[at + place].double(), keys[rows].double(), values[rows].double(), visible, distances,
                        **{key: value for key, value in features.items() if key != "sliding_window"},
                    )  # fmt: skip
                    about = f"encoder layer {features}, {name} {place}, part {part.how} of {step.counts} {step.encoded}"
                    for one, expected in ((found, wanted[0]), (sums, wanted[1])):
                        if one is not None:
                            off = (one[at + place].cpu().double() - expected).abs()
                            assert (off <= mine.tolerance * (1 + expected.abs())).all(), about
                at += len(places)
