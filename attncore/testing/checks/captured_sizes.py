"""Captured sizes of the persistent door, replayed over batches that grow, shrink and change their order.

On a CUDA device the graphs are CUDA's own; elsewhere a stand-in records the layer and calls it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attncore.builder import MetadataBuilder
from attncore.graphs import capturing, launch, new_graph
from attncore.testing.engines.compare import Row, compare_cache
from attncore.testing.engines.engine import PADDING, Engine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

__all__ = ["test_captured_sizes_over_changing_batches"]
SIZES = (1, 2, 4, 8)
DRAFTS = 2


@covers("captured sizes")
@pytest.mark.parametrize("tokens", [1, 1 + DRAFTS])
def test_captured_sizes_over_changing_batches(
    attncore_subject: Subject, attncore_captured_steps: int, tokens: int
) -> None:
    """Decodes of one token, and of drafts beside it: every replay gives what dense attention gives."""
    form = attncore_subject.form
    if form.cuda_graph == "never":
        raise UnsupportedError("its spec says cuda_graph='never'")
    attncore_subject.require_phase("prefill", "decode")
    if tokens > 1:
        attncore_subject.require("multi_token_decode")
        if form.cuda_graph == "uniform_decode":
            raise UnsupportedError("its spec declares graphs of decodes of one token only")
    engine = CapturedEngine(attncore_subject.backend(), tokens)
    for _ in range(attncore_captured_steps):
        engine.change()
        engine.replayed()


class CapturedEngine(Engine):
    """An engine whose decodes of ``tokens`` each run through graphs of SIZES, and all else without."""

    def __init__(self, backend: AttentionBackend, tokens: int, *, seed: int = 0, **features: Any) -> None:
        super().__init__(backend, seed=seed, **features)
        self.tokens_each = tokens
        self.longest = min(3 * self.block_size, self.block_size + 64)
        most = max(SIZES) * tokens
        self.builder = MetadataBuilder(
            self.batch,
            backend,
            max_num_batched_tokens=max(SIZES) * self.longest,
            decode_threshold=tokens,
        )
        dtype = getattr(torch, self.config.dtype)
        self.given = [tensor.to(self.config.device, dtype) for tensor in self.tensors(most)]
        self.names = iter(range(10**9))
        self.graphs = {size: self._captured(size) for size in sorted(SIZES, reverse=True)}

    def _captured(self, size: int) -> tuple[Any, Tensor]:
        metadata = self.builder.capture(size, self.tokens_each)
        launch(self._layer, size, metadata)  # a warm-up, over a step of nobody
        graph = new_graph(self.config.device)
        with capturing(graph):
            metadata.record()
            output = launch(self._layer, size, metadata)
        return graph, output

    def _layer(self, size: int, metadata: Any) -> Tensor:
        return self.forward([tensor[: size * self.tokens_each] for tensor in self.given], metadata)

    def step(self, scheduled: Mapping[Any, int], **_: Any) -> Tensor:
        """A step without a graph, by the metadata that goes to the device as an engine's does."""
        metadata = self.builder.build({**dict.fromkeys(self.batch.req_ids, 0), **scheduled})
        rows = [Row(name, scheduled[name], len(self.said[name][0])) for name in metadata.req_ids]
        return self._run(metadata, rows)

    def change(self) -> None:
        """Requests leave, others arrive, prompts run beside decodes, a dummy step runs."""
        draw = self.random.random
        for name in list(self.batch.req_ids):
            if len(self.said[name][0]) + self.tokens_each > self.longest or draw() < 0.05:
                self.remove(name)
        wanted = int(self.random.integers(1, max(SIZES) + 1))
        arrived = {}
        while len(self.batch) < wanted and (draw() < 0.5 or not len(self.batch)):
            name, length = next(self.names), int(self.random.integers(1, self.longest - self.tokens_each))
            self.add(name, length)
            arrived[name] = length
        if arrived:
            beside = {name: 1 for name in self.batch.req_ids if name not in arrived and draw() < 0.5}
            for name in beside:
                self._room(name, 1)
            self.step({**arrived, **beside})
            for name in self.batch.req_ids:
                if len(self.said[name][0]) + self.tokens_each > self.longest:
                    self.remove(name)
        if draw() < 0.1:
            size = int(self.random.choice(SIZES))
            before = self.pages.snapshot()
            self.builder.build_empty(size).replay(self.graphs[size][0])
            compare_cache(self.pages, before, np.empty(0, np.int64))

    def replayed(self) -> None:
        """A step of some of the requests, in their graph; its output and what it wrote are compared."""
        chosen = [name for name in self.batch.req_ids if self.random.random() < 0.8]
        if not chosen:
            return
        each, count = self.tokens_each, len(chosen) * self.tokens_each
        for name in chosen:
            self._room(name, each)
        self._poison()
        before = self.pages.snapshot()
        size = min(size for size in SIZES if size >= len(chosen))
        fresh = self.tensors(count)
        for held, new in zip(self.given, fresh, strict=True):
            held[:count].copy_(new)
            held[count:] = PADDING
        scheduled = {**dict.fromkeys(self.batch.req_ids, 0), **dict.fromkeys(chosen, each)}
        metadata = self.builder.build(scheduled, bucket=size)
        graph, output = self.graphs[size]
        metadata.replay(graph)
        answer = output[:count].cpu()
        slots = metadata.host.slot_mapping[:count]
        compare_cache(self.pages, before, slots)
        self.written[slots // self.block_size, slots % self.block_size] = True
        rows, expected = [], []
        for i, name in enumerate(metadata.req_ids):
            rows.append(Row(name, each, len(self.said[name][0])))
            query, key, value = (part[i * each : (i + 1) * each] for part in fresh)
            self.said[name] = tuple(
                torch.cat((old, new)) for old, new in zip(self.said[name], (key, value), strict=True)
            )  # type: ignore[assignment]
            expected.append(self.dense(query, *self.said[name]))
        self.compare(answer, expected, rows)
        rejected = {name: int(self.random.integers(0, each)) for name in chosen}
        self.batch.rollback_many(rejected)
        for name, drafts in rejected.items():
            kept = len(self.said[name][0]) - drafts
            self.said[name] = tuple(part[:kept] for part in self.said[name])  # type: ignore[assignment]

    def _room(self, name: Any, tokens: int) -> None:
        """Blocks for the request's next ``tokens``."""
        missing = -(-(len(self.said[name][0]) + tokens) // self.block_size) - len(self.batch.block_ids(name))
        for _ in range(missing):
            block = self.free.pop()
            self.shared[block] = self.shared.get(block, 0) + 1
            self.batch.append_blocks(name, [block])
