"""A program of adopted steps: an engine's own tensors, in place or new ones, eager or padded for graphs."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import as_on_a_device
from builder.plain_backend import Least, config
from fuzz.steps.captured import Snapshot
from fuzz.steps.compared import LIVE, Comparer, Part, as_list
from fuzz.steps.parts import Parts
from fuzz.steps.rows import Row, fields_of
from fuzz.steps.settings import MAX_REQS, MAX_TOKENS, MODEL_LEN, NUM_BLOCKS, WORDS, Settings
from torch import Tensor

from attncore import AdoptedSteps, BackendSpec, MultipleOf
from attncore.builder import KVCacheGroup
from attncore.graphs import capturing, new_graph

UNREAD = frozenset({"slot_mapping", "block_table", "paged_kv_indices"})
"""What the host has not of tensors on a device."""


class NotNowError(Exception):
    """What a plan raises that fails."""


class Planning(Least):
    """``planned`` is called with each step that the host plans."""

    has_plan = True

    def plan(self, metadata: Any) -> None:
        self.planned(metadata)  # type: ignore[attr-defined]


class Buffers:
    """An engine's tensors, of which each step takes the beginning."""

    def __init__(self, columns: int, device: str) -> None:
        self.starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(MAX_REQS, dtype=torch.int32, device=device)
        self.table = torch.zeros((MAX_REQS, columns + 3), dtype=torch.int32, device=device)
        self.slots = torch.full((MAX_TOKENS,), -1, device=device)


class AdoptedProgram:
    def __init__(self, draw: random.Random, kernels: str, device: str = "cpu") -> None:
        self.draw, self.size = draw, draw.choice([1, 2, 3, 4, 16])
        needs = frozenset(draw.sample(WORDS, draw.randint(0, len(WORDS))))
        self.settings = settings = Settings(
            kernels, [KVCacheGroup("g0", self.size, kernel_block_size=self.size)], [], threshold=draw.choice([1, 2, 4]),
            depth=draw.choice([1, 2, 3]), backend=True, pad_seq_len=draw.choice([0, 1]), device_needs={"g0": needs},
            device=device,
        )  # fmt: skip
        self.level = draw.choice(["uniform_decode", "uniform", "always"])
        spec = BackendSpec(
            name="least", api=1, factory="nowhere:Least", devices={"any": 0}, dtypes={"float32"}, head_sizes={8},
            block_sizes=MultipleOf(1), cuda_graph=self.level, device_needs=needs, host_lengths="bounded",
            pad_seq_len=settings.pad_seq_len, features={"multi_token_decode"},
        )  # fmt: skip
        self.plans = draw.random() < 0.4
        backend = (Planning if self.plans else Least)(replace(config(spec, self.size), device=device))
        backend.planned = self._planned
        self.steps = AdoptedSteps(
            backend, max_num_reqs=MAX_REQS, max_num_tokens=MAX_TOKENS, max_model_len=MODEL_LEN,
            num_blocks=NUM_BLOCKS, decode_threshold=settings.threshold, depth=settings.depth, kernels=kernels,
        )  # fmt: skip
        self.on_device = settings.lags or draw.random() < 0.5
        if self.on_device and not settings.lags:
            as_on_a_device(self.steps)
        self.comparer = Comparer(draw, settings)
        self.parts = Parts(draw, settings, {"g0": backend})
        self.parts.adopts = False
        self.columns = -(-MODEL_LEN // self.size)
        self.buffers = [Buffers(self.columns, device) for _ in range(draw.choice([1, 2]))]
        self.captured: dict[int, Any] = {}
        """Rows -> (tokens a row, graph, what it has read, which fields these are, buffers)."""
        self.earlier: deque[Part] = deque(maxlen=settings.depth - 1)
        self.last: Part | None = None
        self.fails = False

    def close(self) -> None:
        self.comparer.check()

    def _planned(self, metadata: Any) -> None:
        if self.draw.random() < 0.4:
            for name in self.draw.sample(["seq_lens", "positions", "seq_start_loc", "paged_kv_indptr"], 2):
                for view in (metadata, metadata.prefill_metadata):
                    getattr(view, name, None)
        if self.fails:
            raise NotNowError
        assert metadata.kept == {}
        metadata.kept["planned"] = metadata.step

    def step(self) -> None:
        draw = self.draw
        if self.settings.lags:
            self.comparer.lag()
        if len(self.captured) < 3 and draw.random() < 0.15:
            self._capture(draw.choice([rows for rows in range(1, MAX_REQS + 1) if rows not in self.captured]))
        size = draw.choice(list(self.captured)) if self.captured and draw.random() < 0.5 else None
        if size is None:
            # As many rows as a captured size has may be taken for one of it.
            count = draw.choice([n for n in range(1, MAX_REQS + 1) if n not in self.captured])
            rows = self._rows([draw.randint(1, draw.choice([1, 4, 12])) for _ in range(count)])
            self._built(rows, None, draw.choice([*self.buffers, None]))
            return
        each, *graph, buffers = self.captured[size]
        rows = self._rows([each] * draw.randint(1, size))
        self._built(rows, (size, size * each, each), buffers, graph)

    def _capture(self, size: int) -> None:
        draw = self.draw
        each = draw.randint(1, self.settings.threshold) if self.level != "uniform_decode" else 1
        buffers, names = draw.choice(self.buffers), frozenset(draw.sample(WORDS, draw.randint(0, len(WORDS))))
        given, part = self._given(self._rows([each] * size), (size, size * each, each), buffers)
        if draw.random() < 0.5:
            self.steps.capture(size, each)
            metadata = self.steps.build(**given)
        else:
            metadata = self.steps.build(**given, capturing=True)
        self.earlier.clear()
        part, names = replace(part, metadata={"g0": metadata}), names - {"paged_kv_indices"}
        graph = new_graph(self.settings.device)
        self.comparer.compare(part, names=names, sides=("device",))
        with capturing(graph):
            if draw.random() < 0.7:
                metadata.record()
            seen = Snapshot(metadata, names)
        self.captured[size] = each, graph, seen, names, buffers
        self.last = None

    def _rows(self, counts: list[int]) -> list[Row]:
        """Rows of so many tokens: those ahead of the first long one are decodes."""
        draw, rows, decode = self.draw, [], True
        if draw.random() < 0.7:
            counts = sorted(counts)
        for index, count in enumerate(counts):
            decode = decode and count <= self.settings.threshold
            first = draw.randint(0, MODEL_LEN - count - 4)
            blocks = [draw.randrange(1, NUM_BLOCKS) for _ in range(self.columns)]
            positions = tuple(range(first, first + count))
            rows.append(Row(f"r{index}", {"g0": blocks}, first, positions, (0,) * count, (0,) * count, decode=decode))
        return rows

    def _given(
        self, rows: list[Row], padded: tuple[int, int, int] | None, buffers: Buffers | None
    ) -> tuple[dict[str, Any], Part]:
        """The arguments of a build, and what its step is."""
        draw, (group,) = self.draw, self.comparer.groups.values()
        wanted, buffers = fields_of(rows, group), buffers or Buffers(self.columns, self.settings.device)
        count, tokens, _ = padded or (len(rows), wanted["num_tokens"], 0)
        buffers.starts[:] = wanted["num_tokens"]
        buffers.starts[: len(rows) + 1] = self._sent(wanted["query_start_loc"])
        buffers.lengths.zero_()
        buffers.lengths[: len(rows)] = self._sent(wanted["seq_lens"])
        buffers.table.zero_()
        for index, row in enumerate(rows):
            buffers.table[index, : self.columns] = self._sent(row.blocks["g0"])
        buffers.slots.fill_(-1)
        buffers.slots[: wanted["num_tokens"]] = self._sent(wanted["slot_mapping"])
        host_rows, bounded = rows, draw.random() < 0.4
        if bounded:
            host_rows = [row.moved_by(draw.randint(0, min(3, MODEL_LEN - row.stop))) for row in rows]
        lengths = np.zeros(count, np.int32)
        lengths[: len(rows)] = fields_of(host_rows, group)["seq_lens"]
        given = {
            "query_start_loc": buffers.starts[: count + 1], "seq_lens": buffers.lengths[:count],
            "block_table": buffers.table[:count, : self.columns], "slot_mapping": buffers.slots[:tokens],
        }  # fmt: skip
        if bounded or self.on_device or draw.random() < 0.7:
            given |= {"host_query_start_loc": self._host_starts(wanted, count), "host_seq_lens": lengths}
        if bounded:
            given["bounded"] = True
        missing = {"tree_mask", "span_ends"} | (UNREAD if self.on_device else set())
        part = Part({}, rows, host_rows, ("adopted", f"bounded {bounded}"), padded=padded, bounded=bounded,
                    names=False, lent=True, encoder=False,
                    missing=frozenset(missing), exact_on_host=frozenset({"slot_mapping"}))  # fmt: skip
        return given, part

    def _sent(self, numbers: list[int]) -> Tensor:
        """Without waiting for the device."""
        made = torch.tensor(numbers)
        return made.pin_memory().to(self.settings.device, non_blocking=True) if self.settings.lags else made

    @staticmethod
    def _host_starts(wanted: dict[str, Any], count: int) -> Any:
        starts = wanted["query_start_loc"]
        return np.array(starts + starts[-1:] * (count + 1 - len(starts)), np.int32)

    def _built(
        self, rows: list[Row], padded: tuple[int, int, int] | None, buffers: Buffers | None, graph: Any = None
    ) -> None:
        draw = self.draw
        in_place = self.last is not None and buffers is not None  # what the last step had may be written over
        given, part = self._given(rows, padded, buffers)
        if self.plans and draw.random() < 0.15:
            self.fails, before = True, self.steps.last_step
            with pytest.raises(NotNowError):
                self.steps.build(**given)
            self.fails = False
            assert self.steps.last_step == before
            if self.last is not None and not in_place and self.settings.depth > 1:
                self.comparer.compare(replace(self.last, stale=True))
        metadata = self.steps.build(**given)
        part = replace(part, metadata={"g0": metadata})
        if self.plans:
            assert metadata.kept == {"planned": metadata.step}
        if graph is not None and draw.random() < 0.8:
            graph, seen, names = graph
            graph.replay()
            self.comparer.compare(replace(part, metadata={"g0": seen}, whole=False), names=names, sides=("device",))
        elif graph is not None:
            metadata.record()
        self.comparer.compare(part, some=draw.choice([0.3, 1.0]))
        parts = [part]
        for _ in range(draw.choice([1, 2])):
            made = [deeper for one in parts for deeper in self.parts.of(one)]
            for one in made:
                self.comparer.compare(one)
            parts = made
        self.comparer.compare(part)
        for one in self.earlier:
            wanted = self.comparer.expected(one, *self.comparer.groups.values(), one.host_rows)
            for name, value in wanted.items():
                if name not in LIVE | UNREAD and not name.startswith(("num_", "max_")) and name not in one.missing:
                    found = as_list(getattr(one.any.host, name))
                    assert found == value, ("earlier", name, found, value)
        self.earlier.append(part)
        self.last = part
