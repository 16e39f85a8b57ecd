"""Steps of an engine's own tensors through layers: fresh ones, buffers, and captured sizes that the engine pads."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from builder.adopted.adopted_engine import as_on_a_device
from fuzz.layers.captured_layers import CapturedLayers
from fuzz.layers.compared import Step
from fuzz.layers.kept_by_hand import AS_IT_IS, KeptByHand
from fuzz.layers.model import Result
from fuzz.layers.parts import Part
from fuzz.layers.settings import MAX_REQS, Settings, Tested
from torch import Tensor

from attncore import AdoptedSteps

Tensors = dict[str, Tensor]


def _record(groups: dict[str, Any]) -> None:
    for metadata in groups.values():
        metadata.record()


class AdoptedProgram(KeptByHand):
    """Each group has adopted steps, and an engine's tensors for them."""

    def __init__(self, draw: random.Random, tested: Tested) -> None:
        super().__init__(draw, tested)
        settings = self.settings
        longest = settings.sizes.model_len
        self.buffers: dict[str, Tensors] = {}
        on_device = not tested.lags and draw.random() < 0.5
        for group in settings.groups:
            backend, mine = self.backends[group.name], settings.of(group.name)
            steps = self.builders[group.name] = AdoptedSteps(
                backend, max_num_reqs=MAX_REQS, max_num_tokens=2 * longest, max_model_len=longest + 4,
                num_blocks=self._num_blocks(group.name), decode_threshold=settings.threshold,
                depth=draw.choice([1, 2, 3]),
            )  # fmt: skip
            if on_device and backend.spec is not None and "slot_mapping" not in backend.spec.host_needs:
                as_on_a_device(steps)
            columns = -(-longest // mine.block_size) + draw.choice([0, 2])
            int32: dict[str, Any] = {"dtype": torch.int32, "device": self.numbers.device}
            wide = torch.zeros((MAX_REQS, columns + draw.choice([0, 3])), **int32)
            self.buffers[group.name] = {
                "query_start_loc": torch.zeros(MAX_REQS + 1, **int32),
                "seq_lens": torch.zeros(MAX_REQS, **int32),
                "block_table": wide[:, :columns],
                "slot_mapping": torch.full((2 * longest,), -1, device=self.numbers.device),
            }
        self.bounds = all(
            backend.spec is not None and backend.spec.host_lengths != "exact" for backend in self.backends.values()
        )
        by_hand = any(backend.spec is None for backend in self.backends.values())  # it reads the host of the capture
        if tested.cuda_graph != "never" and not by_hand and not any(layer.whole for layer in settings.layers):
            self._capture_sizes()

    def _limit(self, settings: Settings) -> None:
        super()._limit(settings)
        settings.groups = settings.decoders

    def _capture_sizes(self) -> None:
        draw = self.draw
        layers = list(zip(self.settings.layers, self.impls, strict=True))
        with_lse = "lse" in self.tested.features and draw.random() < 0.5
        most = 1 if self.tested.cuda_graph == "uniform_decode" else self.settings.threshold
        for rows in draw.sample(range(1, MAX_REQS + 1), 2):
            each = draw.randint(1, most)
            groups = {}
            for name, steps in self.builders.items():
                given = self._views(name, rows, rows * each)
                given["query_start_loc"][:] = torch.arange(rows + 1) * each
                given["seq_lens"].fill_(each)
                given["slot_mapping"].fill_(-1)
                given["block_table"].zero_()
                groups[name] = steps.build(**given, **self._on_host(given), capturing=True)
            made = SimpleNamespace(num_tokens=rows * each, groups=groups, record=partial(_record, groups))
            self.captured[rows, rows * each] = CapturedLayers(
                made, layers, self.caches, self.settings, self.numbers, each, with_lse
            )

    def _views(self, group: str, rows: int, slots: int) -> Tensors:
        """The first rows of the engine's buffers."""
        held = self.buffers[group]
        return {
            "query_start_loc": held["query_start_loc"][: rows + 1], "seq_lens": held["seq_lens"][:rows],
            "block_table": held["block_table"][:rows], "slot_mapping": held["slot_mapping"][:slots],
        }  # fmt: skip

    @staticmethod
    def _on_host(given: Tensors) -> dict[str, Any]:
        return {f"host_{name}": given[name].cpu().numpy().copy() for name in ("query_start_loc", "seq_lens")}

    def step(self) -> None:
        self._change_requests()
        self._change_layers()
        counts, _ = self._scheduled_counts()
        draw = self.draw
        while sum(counts.values()) > 2 * self.settings.sizes.model_len:
            counts.popitem()
        if not counts:
            return
        order = sorted(counts, key=lambda name: counts[name] > self.settings.threshold or not self.held[name].computed)
        if draw.random() < 0.3:
            draw.shuffle(order)  # right in any order
        counts = {name: counts[name] for name in order}
        tokens = sum(counts.values())
        sizes = [size for size in self.captured if size[0] >= len(counts) and size[1] >= tokens]
        size = draw.choice(sizes) if sizes and draw.random() < 0.7 else None
        bounded = self.bounds and draw.random() < 0.3
        longest = 2 * self.settings.sizes.model_len
        rows, slots = size or (len(counts) + draw.choice([0, 0, 1]), min(longest, tokens + draw.choice([0, 0, 2])))
        rows = min(rows, MAX_REQS)
        padded = {size[0]: size for size in self.captured}
        if size is None and slots <= padded.get(rows, (0, 0))[1]:  # that of a graph, which the engine pads
            size, slots = padded[rows], padded[rows][1]
        fresh = rows not in padded and draw.random() < 0.5
        step, groups = self._new_step(counts, {}), {}
        for name, steps in self.builders.items():
            given = self._views(name, rows, slots)
            if fresh:
                given = {key: value.clone() for key, value in given.items()}
            self._fill(name, counts, given)
            host = self._on_host(given)
            if bounded:
                room = given["block_table"].shape[1] * self.settings.of(name).block_size
                host["host_seq_lens"][: len(counts)] += draw.randint(0, 4)
                host["host_seq_lens"] = host["host_seq_lens"].clip(max=min(room, self.settings.sizes.model_len + 4))
            elif steps._on_cpu and draw.random() < 0.5:
                host = {}
            groups[name] = steps.build(**given, **host, bounded=bounded)
        graphs = {metadata.use_cuda_graph for metadata in groups.values()}
        queries = self._queries(step)
        whole = Part(groups, [*range(tokens)], how=("adopted", *(("bounded",) if bounded else ())))
        if graphs == {True}:
            found = self._replayed(size, AS_IT_IS, whole, step, queries)
        else:
            if size is not None:
                for metadata in groups.values():
                    metadata.record()
            found = self._eager_adopted(whole, step, queries)
        self._end(step, found, queries)

    def _eager_adopted(self, whole: Part, step: Step, queries: list[Tensor]) -> list[Result]:
        found: list[Result] = []
        parts, planned = [whole], True
        if self.draw.random() < 0.3 and "bounded" not in whole.how:
            parts, planned = self._parts(whole, "decode", "prefill"), False
        for part in parts:
            if not planned:
                for group, metadata in part.metadata.items():
                    if self.backends[group].has_plan:
                        self.backends[group].plan(metadata)
            for number, layer in enumerate(self.settings.layers):
                if not layer.whole or (self._is_whole(part, step) and "bounded" not in whole.how):
                    found.append((number, part, *self._run(number, part, queries[number], step)))
        return found

    def _fill(self, group: str, counts: dict[str, int], given: Tensors) -> None:
        """The step of a group in the engine's tensors; rows and slots behind it are padding."""
        size, columns = self.settings.of(group).block_size, given["block_table"].shape[1]
        window = next(one.sliding_window for one in self.settings.groups if one.name == group)
        null = window is not None and self.draw.random() < 0.5
        starts, lengths, slots = [0], [], []
        table = torch.zeros_like(given["block_table"])
        for row, (name, count) in enumerate(counts.items()):
            request = self.held[name]
            ids = request.blocks[group][:columns]
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            span = range(request.computed, request.computed + count)
            slots += [ids[at // size] * size + at % size for at in span]
            if null and window is not None:  # what the window has passed is the null block
                table[row, : max(0, request.computed - window + 1) // size] = 0
            starts.append(starts[-1] + count)
            lengths.append(span.stop)
        rows = len(given["seq_lens"])
        starts += [starts[-1]] * (rows - len(counts))
        given["query_start_loc"].copy_(torch.tensor(starts))
        given["seq_lens"].copy_(torch.tensor(lengths + [0] * (rows - len(counts))))
        given["slot_mapping"].fill_(-1)
        given["slot_mapping"][: len(slots)] = torch.tensor(slots)
        given["block_table"].copy_(table)
