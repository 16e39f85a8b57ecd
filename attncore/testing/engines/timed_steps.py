"""Steps of a backend that the latency suite times: of stated shapes by the persistent builder, or of a batch file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder
from attncore.json_lines.list_builder import Batch
from attncore.registry.spec.sizes import as_sizes, largest_to
from attncore.show import counted
from attncore.testing.engines.requests import require_blocks
from attncore.testing.engines.saved_steps import read_steps
from attncore.testing.engines.steps_on_device import planned, reads_page_lists
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

    from attncore.abstract import AttentionBackend
    from attncore.builder import CommonAttentionMetadata
    from attncore.registry.spec.backend_spec import BackendSpec

    Build = Callable[[], CommonAttentionMetadata]

SHAPES: Mapping[str, list[tuple[int, int]]] = {
    "decode of 1": [(1000, 1)],
    "decode of 32": [(16 * i, 1) for i in range(1, 33)],
    "prefill of 256": [(0, 256)],
    "chunk of 128 beside 16 decodes": [(512, 128), *((32 * i, 1) for i in range(1, 17))],
}
"""Name -> requests of (context, tokens of the step)."""
SAVED = "saved steps"
REQUEST: Mapping[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": None}
READ = ("slot_mapping", "query_start_loc", "seq_lens", "block_table", "paged_kv_indptr", "paged_kv_indices")
"""What layers read of a step of the list builder; each field goes to the device when it is first read."""


class Timed:
    """A backend and one or more steps: what is timed calls ``build``, ``plan``, ``commit`` or ``forward`` for each.

    ``shape`` is a name of SHAPES, or SAVED for the steps of the file ``saved``. ``builds`` builds each step on the
    host, ``sends`` builds, plans and sends it. Who times ``forward`` calls ``plan`` before the first call: ``commit``
    plans others, and a library may keep one plan.
    """

    def __init__(self, subject: Subject, shape: str, request: Mapping[str, Any], saved: str | Path | None) -> None:
        form = subject.form
        if shape != SAVED:
            subject.require_phase(*sorted({"prefill" if tokens > 1 else "decode" for _, tokens in SHAPES[shape]}))
            _require_length(form, max(map(sum, SHAPES[shape])))
        self.backend = subject.backend(**_declared_heads(subject, request))
        self.config = self.backend.config
        self.impl = self.backend.impl("layers.0", scale=self.config.head_size**-0.5)
        self.builds: list[Build] = []
        self.sends: list[Build] = []
        self._resets: list[Callable[[], None]] = []
        self.transport = "none"
        blocks = self._saved(saved, form) if shape == SAVED else self._shape(SHAPES[shape])
        require_blocks(form.max_block_id, blocks)
        self.metadata = [planned(self.backend, build()) for build in self.builds]
        self.kv_cache = self.backend.allocate_kv_cache(blocks)
        self.tensors = [self._tensors(len(one.host.slot_mapping)) for one in self.metadata]
        self.num_tokens = sum(len(one.host.slot_mapping) for one in self.metadata)

    def reset(self) -> None:
        """Before each build: the requests stand as before the step."""
        for reset in self._resets:
            reset()

    def build(self) -> None:
        """Build each step's host metadata."""
        for build in self.builds:
            build()

    def commit(self) -> None:
        """Build, plan and send each step, as an engine does; does not wait for the device."""
        for send in self.sends:
            send()

    def plan(self) -> None:
        """Call the backend's plan for each step, which finds nothing kept with it, as in an engine."""
        for metadata in self.metadata:
            metadata.kept.clear()
            self.backend.plan(metadata)

    def forward(self) -> None:
        """One layer's attention of each step, each of several planned again before; waits for the device."""
        several = len(self.metadata) > 1
        for metadata, (query, key, value) in zip(self.metadata, self.tensors, strict=True):
            if several:
                self.backend.plan(metadata)
            self.impl.forward(query, key, value, self.kv_cache, metadata)
        if torch.device(self.config.device).type == "cuda":
            torch.cuda.synchronize()

    def _shape(self, requests: list[tuple[int, int]]) -> int:
        """Make one step of the persistent builder; return how many blocks its cache needs."""
        end = self._persistent(requests, self.builds)
        # On a CPU nothing is sent; a copy within its memory stands for it.
        transport = "copy" if torch.device(self.config.device).type == "cpu" else "auto"
        self._persistent(requests, self.sends, backend=self.backend, transport=transport)
        return end

    def _persistent(self, requests: list[tuple[int, int]], calls: list[Build], **options: Any) -> int:
        """Add the call that builds the step to ``calls``, and what takes it back; return how many blocks it needs."""
        size = self.config.block_size
        longest = max(context + tokens for context, tokens in requests)
        batch = InputBatch(max_num_reqs=len(requests), max_model_len=longest, block_size=size)
        builder = MetadataBuilder(batch, max_num_batched_tokens=sum(tokens for _, tokens in requests), **options)
        scheduled = {i: tokens for i, (_, tokens) in enumerate(requests) if tokens != 1}
        end = 1
        for i, (context, tokens) in enumerate(requests):
            start, end = end, end - (-(context + tokens) // size)
            batch.add_request(i, list(range(start, end)), context)
        built = []

        def build() -> CommonAttentionMetadata:
            built.append(True)
            return builder.build(scheduled)

        def reset() -> None:
            if built:
                built.clear()
                batch.rollback_many({i: tokens for i, (_, tokens) in enumerate(requests)})

        calls.append(build)
        self._resets.append(reset)
        if options:
            self.transport = builder.transport
        return end

    def _saved(self, path: str | Path | None, form: BackendSpec) -> int:
        """Make steps of a batch file, of the list builder; return how many blocks their cache needs."""
        if path is None:
            raise UnsupportedError("the test file sets no STEPS")
        try:
            steps = read_steps(path)
        except ValueError as error:
            raise ValueError(f"STEPS: {error}") from None
        for batch in steps.batches:
            if batch.block_size != self.config.block_size:
                raise UnsupportedError(
                    f"the steps have block_size {batch.block_size}, the backend {self.config.block_size}; set REQUEST"
                )
            lengths = (one.query_len + one.context_len for group in batch.groups for one in group.sequences)
            _require_length(form, max(lengths, default=0))
            layout = "flashinfer" if reads_page_lists(form) else "common"
            self.builds.append(_list_build(batch, layout))
            self.sends.append(_reading(_list_build(batch, layout, self.backend)))
        return steps.num_blocks

    def _tensors(self, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
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


def _declared_heads(subject: Subject, request: Mapping[str, Any]) -> dict[str, Any]:
    """The request, with heads of another size where its own is not declared, or holds no values, and with more
    key/value heads where it has those of REQUEST, in groups larger than declared.
    """
    form, size = subject.form, request["head_size"]
    of_values = form.head_size_v if form.mla_only else None
    fits = size in form.head_sizes and (of_values is None or largest_to(as_sizes("", of_values), size) is not None)
    found = {**request, "head_size": size if fits else subject.request().head_size}
    heads, kv_heads, most = REQUEST["num_heads"], REQUEST["num_kv_heads"], form.max_group_size
    if most and (request["num_heads"], request["num_kv_heads"]) == (heads, kv_heads):
        counts = (count for count in range(kv_heads, heads + 1) if not heads % count)
        found["num_kv_heads"] = next(count for count in counts if heads <= most * count)
    return found


def _require_length(form: BackendSpec, tokens: int) -> None:
    """UnsupportedError where a step has a request of more ``tokens`` than the spec allows."""
    if form.max_model_len is not None and tokens > form.max_model_len:
        raise UnsupportedError(
            f"its spec says max_model_len={form.max_model_len}, and this step has a request of "
            f"{counted(tokens, 'token')}"
        )


def _list_build(batch: Batch, layout: str, backend: AttentionBackend | None = None) -> Build:
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


def _reading(build: Build) -> Build:
    """``build``, and all that layers read of the step on the device."""

    def send() -> CommonAttentionMetadata:
        metadata = build()
        for name in READ:
            if hasattr(metadata.host, name):
                getattr(metadata, name)
        return metadata

    return send
