"""The latency suite for pytest-benchmark, adopted by a test file of two lines::

    from attncore.testing.latency import *
    BACKEND = "acme"

It times build, plan, commit (all that an engine's call does: build, plan, and the host's part of sending the step to
the device) and forward of a step over ``SHAPES`` and over saved steps. The file may set ``STEPS`` (a batch file, as
`attncore replay --save-steps` writes it), ``REQUEST`` (fields of the AttentionRequest), ``DEVICE`` and ``OPTIONS``.
`pytest --benchmark-autosave --benchmark-compare --benchmark-compare-fail=median:10%` keeps history and fails on a
regression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder
from attncore.lines.list_builder import Batch, parse_batch
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.testing.engines import planned_steps as steps
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = ["attncore_timed", "pytest_plugins", "test_build", "test_commit", "test_forward", "test_plan"]
pytest_plugins = ("attncore.testing.harness.pytest_plugin",)

SHAPES: Mapping[str, list[tuple[int, int]]] = {
    "decode of 1": [(1000, 1)],
    "decode of 32": [(16 * i, 1) for i in range(1, 33)],
    "prefill of 256": [(0, 256)],
    "chunk of 128 beside 16 decodes": [(512, 128), *((32 * i, 1) for i in range(1, 17))],
}
"""Name -> requests of (context, tokens of the step)."""
SAVED = "saved steps"
REQUEST = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": None}
MOST_STEPS = 32  # of a file: evenly spread over it
READ = ("slot_mapping", "query_start_loc", "seq_lens", "block_table", "paged_kv_indptr", "paged_kv_indices")
"""What layers read of a step of the list door, which goes to the device field by field when it is read."""


class Timed:
    """A backend and one or more steps: what is timed calls ``build``, ``plan``, ``commit`` or ``forward`` for each."""

    def __init__(self, subject: Subject, shape: str, request: Mapping[str, Any], saved: str | Path | None) -> None:
        form = subject.form
        heads = request["head_size"] if request["head_size"] in form.head_sizes else subject.request().head_size
        self.backend = subject.backend(**{**request, "head_size": heads})
        self.config = self.backend.config
        self.impl = self.backend.impl("layers.0", scale=self.config.head_size**-0.5)
        self._builders: list[Callable[[], Any]] = []
        self._senders: list[Callable[[], Any]] = []
        self._resets: list[Callable[[], None]] = []
        self.transport = "none"
        blocks = self._saved(saved, form) if shape == SAVED else self._shape(SHAPES[shape])
        self.metadata = [steps.planned(self.backend, build()) for build in self._builders]
        self.kv_cache = self.backend.allocate_kv_cache(blocks)
        self.tensors = [self._tensors(len(one.host.slot_mapping)) for one in self.metadata]
        self.num_tokens = sum(len(one.host.slot_mapping) for one in self.metadata)

    def reset(self) -> None:
        """Before each build: the requests stand as before the step."""
        for reset in self._resets:
            reset()

    def build(self) -> None:
        """Build each step's host metadata."""
        for build in self._builders:
            build()

    def commit(self) -> None:
        """Build, plan and send each step, as an engine does; does not wait for the device."""
        for send in self._senders:
            send()

    def plan(self) -> None:
        """Call the backend's plan for each step."""
        for metadata in self.metadata:
            self.backend.plan(metadata)

    def forward(self) -> None:
        """One layer's attention of each step; waits for the device."""
        for metadata, (query, key, value) in zip(self.metadata, self.tensors, strict=True):
            self.impl.forward(query, key, value, self.kv_cache, metadata)
        if torch.device(self.config.device).type == "cuda":
            torch.cuda.synchronize()

    def _shape(self, rows: list[tuple[int, int]]) -> int:
        """One step of the persistent door; how many blocks its cache needs."""
        end = self._persistent(rows, self._builders)
        # On a CPU nothing is sent; a copy within its memory stands for it.
        transport = "copy" if torch.device(self.config.device).type == "cpu" else "auto"
        self._persistent(rows, self._senders, backend=self.backend, transport=transport)
        return end

    def _persistent(self, rows: list[tuple[int, int]], calls: list[Callable[[], Any]], **options: Any) -> int:
        """Adds the call that builds the step to ``calls``, and what takes it back; how many blocks the cache needs."""
        size = self.config.block_size
        longest = max(context + tokens for context, tokens in rows)
        batch = InputBatch(max_num_reqs=len(rows), max_model_len=longest, block_size=size)
        builder = MetadataBuilder(batch, max_num_batched_tokens=sum(tokens for _, tokens in rows), **options)
        scheduled = {i: tokens for i, (_, tokens) in enumerate(rows) if tokens != 1}
        end = 1
        for i, (context, tokens) in enumerate(rows):
            start, end = end, end - (-(context + tokens) // size)
            batch.add_request(i, list(range(start, end)), context)
        built = []

        def build() -> Any:
            built.append(True)
            return builder.build(scheduled)

        def reset() -> None:
            if built:
                built.clear()
                batch.rollback_many({i: tokens for i, (_, tokens) in enumerate(rows)})

        calls.append(build)
        self._resets.append(reset)
        if options:
            self.transport = builder.transport
        return end

    def _saved(self, path: str | Path | None, form: BackendSpec) -> int:
        """Steps of a batch file, through the list door."""
        if path is None:
            raise UnsupportedError("the test file sets no STEPS")
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"STEPS: {path} is empty; expected a batch a line")
        chosen = sorted(set(np.linspace(0, len(lines) - 1, min(MOST_STEPS, len(lines))).astype(int).tolist()))
        blocks = 0
        for number in chosen:
            batch = parse_batch(lines[number])
            if batch.block_size != self.config.block_size:
                raise UnsupportedError(
                    f"the steps have block_size {batch.block_size}, the backend {self.config.block_size}; set REQUEST"
                )
            layout = "flashinfer" if "page_list" in form.needs else "common"
            self._builders.append(_list_build(batch, layout))
            self._senders.append(_read(_list_build(batch, layout, self.backend)))
            tables = [
                one.block_table for group in batch.groups for one in group.sequences if one.block_table is not None
            ]
            blocks = max(blocks, *(max(table, default=0) + 1 for table in tables), 1)
        return blocks

    def _tensors(self, tokens: int) -> tuple[Any, Any, Any]:
        config, dtype = self.config, getattr(torch, self.config.dtype)
        shapes = [
            (tokens, heads, size)
            for heads, size in (
                (config.num_heads, config.head_size),
                (config.num_kv_heads, config.head_size),
                (config.num_kv_heads, config.head_size_v or config.head_size),
            )
        ]
        made = [torch.randn(shape, dtype=torch.float32).to(config.device, dtype) for shape in shapes]
        return made[0], made[1], None if config.use_mla else made[2]


def _list_build(batch: Batch, layout: str, backend: Any = None) -> Callable[[], Any]:
    builder = CommonMetadataBuilder(
        batch.block_size,
        layout,
        sliding_window=batch.sliding_window,
        chunked_prefill=batch.chunked_prefill,
        max_seq_len_to_capture=batch.max_seq_len_to_capture,
        encoder_decoder=batch.encoder_decoder,
        backend=backend,
    )
    return lambda: builder.build(batch.groups, batch.cuda_graph_pad_size)


def _read(build: Callable[[], Any]) -> Callable[[], Any]:
    def send() -> Any:
        metadata = build()
        return [getattr(metadata, name) for name in READ if hasattr(metadata.host, name)]

    return send


@pytest.fixture(scope="module", params=[*SHAPES, SAVED])
def attncore_timed(request: pytest.FixtureRequest) -> Iterator[Timed]:
    """A backend and the steps to time, made once for all tests."""
    module = request.module
    name = getattr(module, "BACKEND", None)
    if not isinstance(name, str):
        raise ValueError('BACKEND: the test file must name the backend: BACKEND = "acme"')
    subject = Subject(name, device=getattr(module, "DEVICE", None), options=getattr(module, "OPTIONS", None))
    fields = {**REQUEST, **getattr(module, "REQUEST", {})}
    try:
        yield Timed(subject, request.param, fields, getattr(module, "STEPS", None))
    except UnsupportedError as error:
        pytest.skip(f"unsupported: {error}")


def _info(benchmark: Any, timed: Timed, group: str) -> None:
    benchmark.group = group
    benchmark.extra_info.update(
        backend=timed.backend.name,
        device=timed.config.device,
        steps=len(timed.metadata),
        tokens=timed.num_tokens,
        block_size=timed.config.block_size,
    )


def test_build(benchmark: Any, attncore_timed: Timed) -> None:
    """The metadata of a step, on the host."""
    _info(benchmark, attncore_timed, "build")
    benchmark.pedantic(attncore_timed.build, setup=attncore_timed.reset, rounds=200, warmup_rounds=10)


def test_plan(benchmark: Any, attncore_timed: Timed) -> None:
    """The backend's plan of a step."""
    _info(benchmark, attncore_timed, "plan")
    benchmark(attncore_timed.plan)


def test_commit(benchmark: Any, attncore_timed: Timed) -> None:
    """All that an engine's call does before the first layer: build, plan, and the host's part of sending the step."""
    _info(benchmark, attncore_timed, "commit")
    benchmark.extra_info["transport"] = attncore_timed.transport
    benchmark.pedantic(attncore_timed.commit, setup=attncore_timed.reset, rounds=200, warmup_rounds=10)


def test_forward(benchmark: Any, attncore_timed: Timed) -> None:
    """One layer's attention of a step, until the device is done."""
    _info(benchmark, attncore_timed, "forward")
    benchmark(attncore_timed.forward)
