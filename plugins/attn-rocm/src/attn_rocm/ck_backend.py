"""The variant ``ck``: whole prompts by flash-attn's CK build, from raw keys and values; the rest by Triton kernels.

flash-attn is handed no block table: its CK build wants pages of 128 tokens, and its Triton build, under
``FLASH_ATTENTION_TRITON_AMD_ENABLE``, ignores the table in silence (2.8.3.post2).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_rocm.triton_backend import TritonBackend, TritonImpl
from attncore import AttentionBackend, AttentionMetadata, BackendConfig


class CkImpl(TritonImpl):
    """One layer. A step whose prompts all begin in it runs them by flash-attn; chunks behind a context do not."""

    backend: CkBackend

    def __init__(self, backend: AttentionBackend, layer_name: str, **given: Any) -> None:
        super().__init__(backend, layer_name, **given)
        window = self.sliding_window
        self._flash = {
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": self.logits_soft_cap or 0.0,
            "alibi_slopes": self.slopes,
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
        # Without a write the keys are the cache's, which the Triton kernels read.
        raw = lse is None and (write or kv_cache is None)
        prompts = metadata.prefill_metadata if raw else None
        # Decodes of a profiling run have no table, and their own keys alone.
        cached = not metadata.num_decode_tokens or (kv_cache is not None and metadata.block_table.shape[1])
        if prompts is None or not cached or bool(prompts.host.context_lens.any()):
            super()._attend(query, key, value, kv_cache, metadata, output, lse, write=write)
            return
        if kv_cache is not None:
            self.written(key, value, kv_cache, metadata.slot_mapping, write=True)
        first = metadata.num_decode_tokens if metadata.decodes_first else 0
        tokens = slice(first, first + metadata.num_prefill_tokens)
        starts, longest = prompts.query_start_loc, prompts.max_query_len
        output[tokens] = self.backend.flash_attn_varlen_func(
            q=query[tokens], k=key[tokens], v=value[tokens], cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=longest, max_seqlen_k=longest, **self._flash,
        )  # fmt: skip
        decodes = metadata.decode_metadata
        if decodes is not None:
            start = 0 if metadata.decodes_first else tokens.stop
            rest = slice(start, start + decodes.num_tokens)
            self.launch(query[rest], output[rest], decodes, self.cached_keys(kv_cache, decodes))
        output[metadata.num_tokens :] = 0


class CkBackend(TritonBackend):
    """The variant ``ck``."""

    impl_class = CkImpl

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        from flash_attn import flash_attn_varlen_func

        self.flash_attn_varlen_func = flash_attn_varlen_func
