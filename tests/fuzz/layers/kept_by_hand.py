"""Programs whose engine keeps the requests and their blocks by itself."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from fuzz.layers.compared import Comparer, Step
from fuzz.layers.model import Model, Result
from fuzz.layers.parts import Part
from fuzz.layers.requests import Request
from fuzz.layers.settings import MAX_ENCODER, MAX_REQS, Settings, Tested
from torch import Tensor

AS_IT_IS = SimpleNamespace(replay=lambda graph: graph.replay())
"""Stands for a step whose graph is replayed without a call of its builder."""


class KeptByHand(Model):
    """Requests are lists of blocks; each group has a builder."""

    builders: dict[str, Any]

    def __init__(self, draw: random.Random, tested: Tested) -> None:
        super().__init__(draw, tested)
        self.names = iter(range(10**6))
        self.free: dict[str, list[int]] = {}
        for group in self.settings.groups:
            ids = range(1, self._num_blocks(group.name))
            self.free[group.name] = draw.sample(ids, len(ids))
        self.comparer = Comparer(draw, self.settings, self.held, self._scaled)
        self.cross = self.settings.groups[-1].cross
        self.windows: dict[str, int] = {}
        """Of builders, by group; other windows are those of layers alone."""
        self.chunked, self.threshold = True, self.settings.threshold
        self.builders = {}

    def _limit(self, settings: Settings) -> None:
        settings.trees = settings.spans = settings.states = False

    def _num_blocks(self, group: str) -> int:
        return self.settings.of(group).num_blocks * self._kernel_blocks(group)

    def _parts(self, part: Part, *kinds: str) -> list[Part]:
        """The views of a step's ``kinds``, in the order of its tokens."""
        found, at = [], 0
        for kind in kinds:
            count = getattr(part.any, f"num_{kind}_tokens")
            if count:
                views = {group: getattr(one, f"{kind}_metadata") for group, one in part.metadata.items()}
                found.append(Part(views, part.tokens[at : at + count], how=(*part.how, kind)))
            at += count
        return found

    def _end(self, step: Step, found: list[Result], queries: list[Tensor]) -> None:
        self._remember(step)
        for number, part, output, sums in found:
            self.comparer.compare(number, part, queries[number], step, output, sums)
        for name, count in step.counts.items():
            self.held[name].computed += count
        for name in step.encoded:
            self.held[name].encoded = True
        self.comparer.check()

    def _scheduled_counts(self) -> tuple[dict[str, int], list[str]]:
        draw, longest = self.draw, self.settings.sizes.model_len
        alone = draw.random() < 0.5  # decodes alone, if there are any
        prompts, decodes = {}, {}
        for name, request in self.held.items():
            room = longest - request.computed
            if not room or draw.random() < 0.2:
                continue
            is_decode = request.computed and (request.encoded or not request.encoder) and draw.random() < 0.8
            if is_decode:
                decodes[name] = min(room, draw.randint(1, self.threshold))
            elif not request.computed or not self.windows or self.chunked:
                prompts[name] = draw.randint(1, min(room, draw.choice([1, 5, room])))
        if alone and decodes:
            prompts = {}
        for name, count in prompts.items():
            if any(count > window for window in self.windows.values()):
                self.held[name].sparse = True
        counts = prompts | decodes
        for name, count in counts.items():
            self._make_room(name, self.held[name].computed + count)
        return counts, [*prompts]

    def _make_room(self, name: str, tokens: int) -> None:
        """The lists that groups were built from grow."""
        request = self.held[name]
        for group in self.builders:
            while len(request.blocks[group]) * self.settings.of(group).block_size < tokens:
                request.blocks[group].append(self.free[group].pop())

    def _change_requests(self) -> None:
        draw = self.draw
        for name, request in list(self.held.items()):
            if request.computed > self.settings.sizes.model_len - 6 or draw.random() < 0.1:
                for group, ids in self.held.pop(name).blocks.items():
                    self.free[group][:0] = ids
            elif draw.random() < 0.1 and not request.sparse and request.computed > 3:
                request.keep(request.computed - draw.randint(1, 3))
        while len(self.held) < MAX_REQS and draw.random() < 0.6:
            blocks: dict[str, list[int]] = {name: [] for name in self.builders}
            encoder = draw.choice([0, 1, 5, MAX_ENCODER]) if self.cross else 0
            if self.cross:
                size = self.settings.of("cross").block_size
                blocks["cross"] = [self.free["cross"].pop() for _ in range(-(-encoder // size))]
            self.held[f"r{next(self.names)}"] = Request(blocks, encoder)
