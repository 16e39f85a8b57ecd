"""A backend whose layers attend over the keys of all ranks: each over its own by another backend, then merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from attncore.abstract import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionType, LayerFeatures, PlanKey
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.blocks.rank_steps import context_step, new_tokens_step, token_rows
from attncore.builder.checked_backend import check_backend
from attncore.merge import merge_attention
from attncore.ops.cache_writer_checks import check_tensors
from attncore.ops.written_tensor import check_written
from attncore.quoted import quoted
from attncore.ranks.exchange import Exchange
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


def over_ranks(backend: AttentionBackend, ranks: ContextParallel, *, group: Any = None) -> AttentionBackend:
    """``backend`` with layers that attend over the keys of all ranks of ``group`` (None: all of torch.distributed).

    ``ranks`` says which tokens this rank keeps, in blocks of ``backend.config.block_size``. Give the result to
    ``MetadataBuilder`` with ``context_parallel=ranks``, to ``paged_caches``, or call its ``impl``: layers take the
    step's queries, keys and values, which are the same on every rank, write what the rank keeps, and return what one
    rank with all keys would, the same bits on each. A layer runs one all-gather of output and log-sum-exp, without
    waiting on the host; steps of decodes can be captured in a CUDA graph. Where all prompts of a step begin in it, none
    runs.

    A prefill runs in two parts where the spec has ``encoder_decoder``: over the context without a mask, and among the
    step's own tokens. Elsewhere, and without ``write``, each of its tokens runs as a decode, which is slow.

    ValueError for a backend without log-sum-exp, a group of another size, and layers that no rank can attend for by
    itself: of a window, slopes or another type than ``decoder``. RuntimeError where torch.distributed does not run.
    Steps that differ between ranks are not found out here, since that would take a message more: the group's library
    ends such ranks, or waits for its timeout.
    """
    check_backend(backend)
    if not isinstance(ranks, ContextParallel):
        raise TypeError(f"ranks: {quoted(ranks)} is not a ContextParallel")
    spec = backend.spec
    if spec is not None and "lse" not in spec.features:
        why = spec.unsupported.get("lse", "its spec does not declare lse")
        raise ValueError(f"backend: {backend.name} returns no log-sum-exp, by which parts are merged: {why}")
    if ranks.block_size != backend.config.block_size:
        raise ValueError(
            f"ranks: blocks of {counted(ranks.block_size, 'token')} on each rank, but the backend's are of "
            f"{backend.config.block_size}"
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("group: torch.distributed does not run; call torch.distributed.init_process_group")
    found = dist.get_rank(group), dist.get_world_size(group)
    if found != (ranks.rank, ranks.world_size):
        raise ValueError(
            f"ranks: rank {ranks.rank} of {ranks.world_size} given; this is rank {found[0]} of {found[1]} in its group"
        )
    return _BackendOverRanks(backend, ranks, group)


class _ImplOverRanks(AttentionImpl):
    """A layer. ``_whole`` has all that it asks for, ``_mine`` this rank's part of it, ``_context`` sees no mask."""

    backend: _BackendOverRanks

    def __init__(self, backend: _BackendOverRanks, layer_name: str, **features: Unpack[LayerFeatures]) -> None:
        super().__init__(backend, layer_name, **features)
        for name in ("sliding_window", "alibi_slopes"):
            if features.get(name) is not None:
                raise ValueError(f"{name}: not with context parallelism; a rank's keys have no distance from a query")
        if self.attn_type is not AttentionType.DECODER:
            raise ValueError(f"attn_type: {self.attn_type} found; ranks share out the keys of decoder layers only")
        inner, ranks = backend.inner, backend.ranks
        without_sinks: Any = {**features, "sinks": None}
        self._whole = self._mine = inner.impl(layer_name, **features)
        if self.sinks is not None and ranks.rank:  # a sink belongs to one part
            self._mine = inner.impl(layer_name, **without_sinks)
        self._context: AttentionImpl | None = None
        if backend.splits_prefills:
            self._context = inner.impl(layer_name, **without_sinks, attn_type=AttentionType.ENCODER_DECODER)

    def scales_changed(self) -> None:
        """See the base class."""
        for impl in {self._whole, self._mine, self._context} - {None}:
            impl.set_scales(self.k_scale, self.v_scale)  # type: ignore[union-attr]

    def sinks_changed(self) -> None:
        """See the base class."""
        self._whole.set_sinks(self.sinks)

    def forward(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata,
        output: Tensor | None = None, *, write: bool = True,
    ) -> Tensor:  # fmt: skip
        """See the base class. All ranks call it for the same step, with the same number of tokens."""
        if kv_cache is None or _brings_its_keys(metadata):
            return self._whole.forward(query, key, value, kv_cache, metadata, output, write=write)
        return self.forward_with_lse(query, key, value, kv_cache, metadata, output, write=write)[0]

    def forward_with_lse(
        self, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata,
        output: Tensor | None = None, *, write: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``forward``, and the log-sum-exp over the keys of all ranks, float32 (tokens, heads)."""
        if kv_cache is None or _brings_its_keys(metadata):
            return self._whole.forward_with_lse(query, key, value, kv_cache, metadata, output, write=write)
        self.check_order(query, metadata)
        if output is not None:
            self._check_output(query, output)
        if self.check_write(write) and self._context is not None and metadata.num_prefills:
            return self._in_two_parts(self._context, query, key, value, kv_cache, metadata, output)
        rows, sent = self.backend.rows(metadata), self._exchange(query)
        _, lse = self._mine.forward_with_lse(query, key, value, kv_cache, rows, sent.output, write=write)
        sent.lse.copy_(lse)
        return sent.merged(self.backend.group, output)

    def _in_two_parts(
        self, context: AttentionImpl, query: Tensor, key: Any, value: Any, kv_cache: Any, metadata: AttentionMetadata,
        output: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """A step with prefills: over what is in the caches of all ranks, and over its own tokens, merged."""
        self._whole.write_cache(key, value, kv_cache, metadata)
        before, new = self.backend.parts(metadata)
        if before is None:
            return self._whole.forward_with_lse(query, key, value, None, new, output)
        sent = self._exchange(query)
        _, lse = context.forward_with_lse(query, None, None, kv_cache, before, sent.output, write=False)
        sent.lse.copy_(lse)
        parts = sent.merged(self.backend.group, None), self._whole.forward_with_lse(query, key, value, None, new)
        found, lse = merge_attention(*zip(*parts, strict=True))
        return (found if output is None else output.copy_(found)), lse

    def _check_output(self, query: Tensor, output: Any) -> None:
        """TypeError or ValueError where ``output``, which a kernel writes by its address, is not as what is merged."""
        check_tensors(output, names=("output",))
        shape = self._shape(query)
        if (output.shape, output.dtype, output.device) != (shape, query.dtype, query.device):
            raise ValueError(
                f"output: {output.dtype} of shape {tuple(output.shape)} on {output.device} found; give {query.dtype} "
                f"of shape {shape} on {query.device}"
            )
        if output.stride(2) != 1:
            raise ValueError(f"output: strides {output.stride()} found; give one contiguous in its last dimension")
        check_written("output", output)

    def _shape(self, query: Tensor) -> tuple[int, int, int]:
        config = self.backend.config
        return len(query), query.shape[1], config.head_size_v or config.head_size

    def _exchange(self, query: Tensor) -> Exchange:
        return Exchange(self._shape(query), query.dtype, query.device)


def _brings_its_keys(metadata: AttentionMetadata) -> bool:
    """Whether a step's keys are all its own, as those of a profiling run: no rank has others."""
    return metadata.from_groups and not metadata.block_table.shape[1]


class _BackendOverRanks(AttentionBackend):
    """What ``over_ranks`` gives: ``inner`` in all that does not attend."""

    impl_class = _ImplOverRanks

    def __init__(self, inner: AttentionBackend, ranks: ContextParallel, group: Any) -> None:
        super().__init__(inner.config)
        self.inner, self.ranks, self.group, self.name = inner, ranks, group, inner.name
        features = inner.spec.features if inner.spec is not None else ()
        self.splits_prefills = "encoder_decoder" in features and not inner.has_plan and not inner.config.use_mla

    def rows(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """The step with one token a row, as it is in steps of decodes; ValueError for captured rows of several."""
        if metadata.max_query_len <= 1 or metadata.from_groups:  # of the list builder: a profiling run
            return metadata
        if metadata.use_cuda_graph:
            raise ValueError(
                f"metadata: captured rows of {counted(metadata.max_query_len, 'token')}; under context parallelism "
                "capture rows of one"
            )
        found = metadata.kept.get((self, "rows"))
        if found is None:
            found = metadata.kept[self, "rows"] = token_rows(metadata, self.ranks, self.inner.from_host)
        return found

    def parts(self, metadata: AttentionMetadata) -> tuple[AttentionMetadata | None, AttentionMetadata]:
        """The step over what was in the cache before it, None where nothing was on any rank; and its own tokens."""
        found = metadata.kept.get((self, "parts"))
        if found is None:
            starts = metadata.host.query_start_loc
            starts = starts[:-1][starts[1:] > starts[:-1]]  # a row without tokens may begin behind the last
            some = bool(metadata.host.positions[starts].any())  # of whole requests, so that all ranks say the same
            before = context_step(metadata, self.ranks, self.inner.from_host) if some else None
            found = metadata.kept[self, "parts"] = before, new_tokens_step(metadata, self.inner.from_host)
        return found

    @property
    def has_plan(self) -> bool:
        """See the base class."""
        return self.inner.has_plan

    @property
    def records_plan(self) -> bool:
        """See the base class."""
        return self.inner.records_plan

    @property
    def plan_keys(self) -> tuple[PlanKey, ...]:
        """See the base class."""
        return self.inner.plan_keys

    def forget_layers(self) -> None:
        """See the base class."""
        self.inner.forget_layers()

    def plan(self, metadata: AttentionMetadata) -> None:
        """See the base class."""
        self.inner.plan(self.rows(metadata))

    def record_plan(self, metadata: AttentionMetadata) -> bool:
        """See the base class."""
        return self.inner.record_plan(metadata)

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """See the base class."""
        return self.inner.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    def allocate_kv_cache(self, num_blocks: int) -> Any:
        """See the base class."""
        return self.inner.allocate_kv_cache(num_blocks)

    def kv_cache_views(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        """See the base class."""
        return self.inner.kv_cache_views(kv_cache)

    def kv_cache_torch_dtype(self) -> torch.dtype:
        """See the base class."""
        return self.inner.kv_cache_torch_dtype()  # type: ignore[no-any-return]

    def from_host(self, array: npt.NDArray[Any]) -> Tensor:
        """See the base class."""
        return self.inner.from_host(array)

    def copy_blocks(self, kv_caches: Sequence[Any], src_to_dst: Any) -> None:
        """See the base class."""
        self.inner.copy_blocks(kv_caches, src_to_dst)

    def swap_blocks(self, src_kv_cache: Any, dst_kv_cache: Any, src_to_dst: Any) -> None:
        """See the base class."""
        self.inner.swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)
