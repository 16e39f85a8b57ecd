"""vLLM's ``AttentionImpl``: one layer, run by the layer of an attncore backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from attncore.integrations.vllm import refusals
from attncore.show import counted


class AttncoreImpl(AttentionImpl):
    """A layer. vLLM makes it with the model; the builder of its group gives it its attncore layer, in ``bind``."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        for why in (refusals.refused_attn_type(attn_type), refusals.refused_cache_dtype(kv_cache_dtype)):
            if why:
                raise ValueError(f"attncore: {why}")
        unknown = [name for name, value in others.items() if value is not None and value is not False]
        if unknown:
            raise ValueError(f"attncore: the model gives its attention {unknown[0]}, which no attncore backend takes")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.sliding_window = sliding_window if sliding_window is not None and sliding_window > 0 else None
        self.logits_soft_cap = logits_soft_cap or None  # vLLM's 0 is none
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._writes = kv_sharing_target_layer_name is None
        self.scales = (1.0, 1.0)
        self._forward: Any = None
        self._before: Any = None
        self._cache: Any = None
        self._pair: Any = None
        self._place = 0
        self._max_block_id: int | None = None

    def bind(self, name: str, backend: Any, before: Any) -> Any:
        """Makes the layer ``name`` of ``backend``, which is returned. ``before`` is called with a captured step, before
        it is read.
        """
        inner = backend.impl(
            name,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            k_scale=self.scales[0],
            v_scale=self.scales[1],
        )
        self._forward, self._before, self._cache, self._pair = inner.forward, before, None, None
        self._max_block_id = backend.spec.max_block_id
        return inner

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attends, and writes the step's keys and values before, unless the layer reads another one's cache.

        ``query`` is (T, heads, size), ``output`` too, T the padded tokens; ``kv_cache`` (blocks, heads, tokens, 2 *
        size). Without metadata, in a profiling run, the output is zeros.
        """
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("attncore: vLLM asks for a quantised output, which fused_output_quant_supported denies")
        if kv_cache is not self._cache or kv_cache.data_ptr() != self._place:  # the same tensor on other memory
            most = self._max_block_id
            if most is not None and len(kv_cache) - 1 > most:  # a worker may not know it before
                raise ValueError(
                    f"attncore: the cache has {counted(len(kv_cache), 'block')}, and the backend reads ids up to "
                    f"{most}; give vLLM less memory (--gpu-memory-utilization), or choose another backend"
                )
            # Keys and values lie side by side in each head's row: a pair of strided views, nothing is copied.
            rows, size = kv_cache.transpose(1, 2), self.head_size
            self._cache, self._pair = kv_cache, (rows[..., :size], rows[..., size:])
            self._place = kv_cache.data_ptr()
        if attn_metadata.use_cuda_graph:
            self._before(attn_metadata)
        count = attn_metadata.num_tokens
        if key is None or value is None:
            self._forward(query[:count], None, None, self._pair, attn_metadata, output[:count], write=False)
        else:
            self._forward(
                query[:count], key[:count], value[:count], self._pair, attn_metadata, output[:count], write=self._writes
            )
        return output
