"""The list builder's steps through layers: prompts, chunks and decodes, padded and replayed, and steps that advance."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from fuzz.layers.captured_layers import CapturedLayers
from fuzz.layers.compared import Step
from fuzz.layers.kept_by_hand import AS_IT_IS, KeptByHand
from fuzz.layers.model import Result
from fuzz.layers.parts import Part
from fuzz.layers.settings import MAX_REQS, Tested
from torch import Tensor

from attncore import CommonMetadataBuilder, Sequence, SequenceGroup

WRITE_EARLY_TOKENS = frozenset(("flash", "flashinfer"))
"""Backends that refuse tokens without a slot, or read what lies there: their layers alone have the windows."""


class ListProgram(KeptByHand):
    """Each group has a state for its graphs, beside its builder."""

    def __init__(self, draw: random.Random, tested: Tested) -> None:
        super().__init__(draw, tested)
        settings = self.settings
        self.chunked = draw.random() < 0.5
        names = {backend.name for backend in self.backends.values()}
        masked = not names & WRITE_EARLY_TOKENS and draw.random() < 0.5
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
