"""The list builder's steps through layers: prompts, chunks and decodes, padded and replayed, and steps that advance."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from fuzz.layers.captured_layers import CapturedLayers
from fuzz.layers.compared import Comparer, Step
from fuzz.layers.parts import Part
from fuzz.layers.program import Program, Result
from fuzz.layers.requests import Request
from fuzz.layers.settings import MAX_ENCODER, MAX_REQS, Tested, draw_first, draw_groups, draw_layers
from torch import Tensor

from attncore import CommonMetadataBuilder, Sequence, SequenceGroup

WRITE_EARLY_TOKENS = frozenset(("flash", "flashinfer"))
"""Backends that refuse tokens without a slot, or read what lies there: their layers alone have the windows."""

AS_IT_IS = SimpleNamespace(replay=lambda graph: graph.replay())
"""Stands for a step whose graph is replayed without a call of its builder."""


class ListProgram(Program):
    """Requests are lists of blocks, which the engine keeps; each group has a builder, and a state for its graphs."""

    def __init__(self, draw: random.Random, tested: Tested) -> None:
        self.draw, self.tested = draw, tested
        self.settings = settings = draw_first(draw, tested)
        draw_groups(draw, settings, tested)
        settings.trees = settings.spans = settings.states = False
        draw_layers(draw, settings, tested)
        self._make_layers()
        self.held: dict[str, Request] = {}
        self.names = iter(range(10**6))
        self.requests: Any = SimpleNamespace(held=self.held)
        self.free: dict[str, list[int]] = {}
        for group in settings.groups:
            ids = range(1, settings.of(group.name).num_blocks * self._kernel_blocks(group.name))
            self.free[group.name] = draw.sample(ids, len(ids))
        self.comparer = Comparer(draw, settings, self.held, self._scaled)
        self.cross = settings.groups[-1].cross
        self.chunked = draw.random() < 0.5
        names = {backend.name for backend in self.backends.values()}
        masked = not names & WRITE_EARLY_TOKENS and draw.random() < 0.5
        self.builders, self.windows = {}, {}
        for group in settings.decoders:
            backend = self.backends[group.name]
            if masked and group.sliding_window is not None:
                self.windows[group.name] = group.sliding_window
            self.builders[group.name] = CommonMetadataBuilder(
                settings.of(group.name).block_size, backend.list_layout, backend=backend,
                sliding_window=self.windows.get(group.name), chunked_prefill=self.chunked,
                encoder_decoder=self.cross and group.name == "g0",
                max_seq_len_to_capture=settings.sizes.model_len + 16,
            )  # fmt: skip
        several = all(backend.list_layout == "flash" for backend in self.backends.values()) and not self.windows
        self.threshold = settings.threshold if several else 1
        self.captured: dict[int, CapturedLayers] = {}
        self.states: dict[str, Any] = {}
        if tested.cuda_graph != "never" and not any(layer.whole for layer in settings.layers):
            self._capture_sizes()

    def _capture_sizes(self) -> None:
        """All groups' layers of a size in one graph."""
        draw, sizes = self.draw, sorted({self.draw.randint(1, MAX_REQS) for _ in range(2)}, reverse=True)
        self.states = {
            name: self.backends[name].get_state_cls()(self.backends[name], builder)
            for name, builder in self.builders.items()
        }
        layers = list(zip(self.settings.layers, self.impls, strict=True))
        with_lse = "lse" in self.tested.features and draw.random() < 0.5
        open_states = [state.graph_capture(MAX_REQS) for state in self.states.values()]
        for one in open_states:
            one.__enter__()
        for size in sizes:
            groups = {name: state.metadata_for_capture(size) for name, state in self.states.items()}
            metadata = SimpleNamespace(num_tokens=size, groups=self._with_cross(groups), record=lambda: None)
            self.captured[size] = CapturedLayers(
                metadata, layers, self.caches, self.settings, self.numbers, 1, with_lse
            )
        for one in open_states:
            one.__exit__(None, None, None)

    def _with_cross(self, groups: dict[str, Any]) -> dict[str, Any]:
        return groups | ({"cross": groups["g0"]} if self.cross else {})

    def step(self) -> None:
        self._change_requests()
        self._change_layers()
        counts, prompts = self._scheduled_counts()
        if not counts:
            return
        groups = self._groups(counts, prompts)
        decodes = not prompts and all(count == 1 for count in counts.values())
        state_sizes = [size for size in self.captured if size >= len(counts)] if decodes else []
        pad = min(state_sizes, default=0) - len(counts) if state_sizes and self.draw.random() < 0.6 else -1
        through_state = pad >= 0 and self.draw.random() < 0.5
        metadata: dict[str, Any] = {}
        for name, builder in self.builders.items():
            if through_state:
                metadata[name] = self.states[name].build(groups[name], pad)
            else:
                metadata[name] = builder.build(groups[name], pad)
        ran = self._run_step(counts, metadata, prompts, pad, through_state)
        if not ran or through_state or not (decodes or self._may_turn(counts, prompts)):
            return
        for index in range(self.draw.randint(0, 3)):
            if any(self.held[name].computed + 1 > self.settings.sizes.model_len for name in counts):
                return
            for name in counts:
                self._make_room(name, self.held[name].computed + 1)
            for one in metadata.values():
                one.advance_step(turn_prefills_into_decodes=not index)
            counts = dict.fromkeys(counts, 1)
            if not self._run_step(counts, metadata, [], pad, False):
                return

    def _may_turn(self, counts: dict[str, int], prompts: list[str]) -> bool:
        """Whether every row may be a decode of one token in the next step."""
        return all(counts[name] == 1 for name in counts.keys() - {*prompts}) and self.draw.random() < 0.5

    def _run_step(
        self, counts: dict[str, int], metadata: dict[str, Any], prompts: list[str], pad: int, through_state: bool
    ) -> bool:
        """Whether it ran: a padded step without its graph does not."""
        if pad >= 0 and not through_state and self.draw.random() < 0.1:
            return False
        step = self._new_step(counts, {})
        queries = self._queries(step)
        tokens = [*range(len(step.tokens))]
        if pad >= 0:
            for name, state in self.states.items():
                if not through_state:
                    state.prepare(metadata[name])
            for name, state in self.states.items():
                state.begin_forward(metadata[name])
            whole = Part(self._with_cross(metadata), tokens, how=("listed",))
            found = self._replayed(len(counts) + pad, AS_IT_IS, whole, step, queries)
        else:
            sparse = any(self.held[name].sparse for name in counts)
            how = ("listed", *(("masked",) if sparse else ()))
            encodes = frozenset(name for name in prompts if self.held[name].encoder and self.held[name].encoded)
            whole = Part(self._with_cross(metadata), tokens, how=how, encodes=encodes)
            found = self._eager_list(whole, step, queries)
        self._end(step, found, queries)
        return True

    def _eager_list(self, whole: Part, step: Step, queries: list[Tensor]) -> list[Result]:
        parts = [whole]
        if not self.cross and self.draw.random() < 0.3:
            parts = self._parts(whole, "prefill", "decode")
        found: list[Result] = []
        for part in parts:
            for group, metadata in part.metadata.items():
                if self.backends[group].has_plan:
                    self.backends[group].plan(metadata)
            for number, layer in enumerate(self.settings.layers):
                if layer.whole and not self._is_whole(part, step):
                    continue
                found.append((number, part, *self._run(number, part, queries[number], step)))
        return found

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

    def _groups(self, counts: dict[str, int], prompts: list[str]) -> dict[str, list[SequenceGroup]]:
        found: dict[str, list[SequenceGroup]] = {}
        joined = [self.draw.random() < 0.3 for _ in counts]
        for group in self.builders:
            found[group] = []
            for index, (name, count) in enumerate(counts.items()):
                request = self.held[name]
                hit = name in prompts and not self.chunked and request.computed > 0
                encoder = (
                    {"encoder_seq_len": request.encoder, "cross_block_table": request.blocks["cross"]}
                    if self.cross and group == "g0" else {}
                )  # fmt: skip
                sequence = Sequence(index, count, request.computed, request.blocks[group])
                last = found[group][-1] if found[group] else None
                if last is not None and not (hit or encoder or last[0] or name in prompts) and joined[index]:
                    found[group][-1] = SequenceGroup(False, [*last[1], sequence])  # sequences of one request
                else:
                    found[group].append(SequenceGroup(name in prompts, [sequence], hit, **encoder))
        return found

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
