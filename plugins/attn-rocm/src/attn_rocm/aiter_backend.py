"""The variants ``aiter`` and ``aiter_paged``: AMD's kernels where they can do a step, the plugin's own for the rest.

Every call is by keyword: positions of arguments change between releases of aiter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_rocm.triton_backend import TritonBackend, TritonImpl
from attncore import AttentionBackend, AttentionMetadata, AttentionType, BackendConfig

PARTITION = 256
"""Keys that a part of aiter's paged kernel has."""


class AiterImpl(TritonImpl):
    """One layer by ``unified_attention``: prompts, chunks and decodes in one call.

    Steps that it cannot do go to the plugin's own kernels: prompts of the list builder, which may have no block table,
    and profiling runs, which have no cache.
    """

    backend: AiterBackend

    def __init__(self, backend: AttentionBackend, layer_name: str, **given: Any) -> None:
        super().__init__(backend, layer_name, **given)
        window = self.sliding_window
        self._layer = {
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": self.logits_soft_cap or 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "alibi_slopes": self.slopes,
            "sinks": self.head_sinks,
        }

    def _attend(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor,
        lse: Tensor | None,
        *,
        write: bool,
    ) -> None:
        if not reads_pages(self, kv_cache, metadata, lse):
            super()._attend(query, key, value, kv_cache, metadata, output, lse, write=write)
            return
        keys, values = self.written(key, value, kv_cache, metadata.slot_mapping, write=write)
        starts = metadata.query_start_loc
        if metadata.use_cuda_graph or len(query) > metadata.num_tokens:
            output.zero_()  # of padding aiter writes nothing
        self.backend.unified_attention(
            q=query, k=keys, v=values, out=output, cu_seqlens_q=starts, max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens[: len(starts) - 1], max_seqlen_k=metadata.max_seq_len,
            block_table=metadata.block_table, **self._layer,
        )  # fmt: skip


class AiterBackend(TritonBackend):
    """The variant ``aiter``."""

    impl_class = AiterImpl

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        from aiter.ops.triton.unified_attention import unified_attention

        self.unified_attention = unified_attention


class AiterPagedImpl(TritonImpl):
    """One layer: decodes by ``paged_attention_v1``, prompts and chunks by the plugin's own kernels."""

    backend: AiterPagedBackend

    def _attend(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor,
        lse: Tensor | None,
        *,
        write: bool,
    ) -> None:
        decodes = metadata.decode_metadata
        if not reads_pages(self, kv_cache, metadata, lse) or decodes is None or decodes.max_query_len > 1:
            super()._attend(query, key, value, kv_cache, metadata, output, lse, write=write)
            return
        caches = self.written(key, value, kv_cache, metadata.slot_mapping, write=write)
        prompts = metadata.prefill_metadata
        if prompts is not None:
            tokens = slice(metadata.num_decode_tokens, metadata.num_tokens)
            self.launch(query[tokens], output[tokens], prompts, self.cached_keys(kv_cache, prompts))
        output[metadata.num_tokens :] = 0
        rows = len(decodes.query_start_loc) - 1
        self._paged(query[:rows], output[:rows], caches, decodes)

    def _paged(self, query: Tensor, output: Tensor, caches: tuple[Tensor, Tensor], decodes: AttentionMetadata) -> None:
        rows, config = len(query), self.backend.config
        keys, values = caches
        if config.kv_cache_layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        parts = rows * config.num_heads * -(-decodes.max_seq_len // PARTITION)
        # Of each part its output in the query's dtype, and the maximum and the sum of its weights in float32.
        workspace = query.new_empty(parts * (config.head_size * query.element_size() + 8), dtype=torch.uint8)
        self.backend.paged_attention_v1(
            out=output, workspace_buffer=workspace, query=query.contiguous(), key_cache=keys,
            value_cache=values, scale=self.scale,
            block_tables=decodes.block_table.contiguous(),  # aiter takes its columns for the stride of its rows
            cu_query_lens=decodes.query_start_loc,
            context_lens=decodes.seq_lens[:rows], max_context_len=decodes.max_seq_len, alibi_slopes=self.slopes,
            kv_cache_dtype="auto", kv_cache_layout=config.kv_cache_layout, logits_soft_cap=self.logits_soft_cap or 0.0,
            k_scale=self.backend.one, v_scale=self.backend.one, fp8_out_scale=None, partition_size=PARTITION,
        )  # fmt: skip


class AiterPagedBackend(TritonBackend):
    """The variant ``aiter_paged``."""

    impl_class = AiterPagedImpl

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        from aiter.ops.attention import paged_attention_v1

        self.paged_attention_v1 = paged_attention_v1
        self.one = torch.ones(1, dtype=torch.float32, device=config.device)


def reads_pages(impl: TritonImpl, kv_cache: Any, metadata: AttentionMetadata, lse: Tensor | None) -> bool:
    """Whether all keys of a step can be read through its block table, by kernels that return no log-sum-exp."""
    if impl.attn_type is not AttentionType.DECODER or lse is not None or kv_cache is None or not metadata.num_tokens:
        return False
    return bool(metadata.block_table.shape[1]) and not (metadata.from_groups and metadata.num_prefills)
