"""One layer's attention: the cache is written, then each part of the step runs where it was planned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from attn_flashinfer.checks import XQA_WINDOW_FP8
from attn_flashinfer.pages import check_cache
from attncore import AttentionImpl, AttentionMetadata, CacheWriter, LayerFeatures, PlanKey

if TYPE_CHECKING:
    from attn_flashinfer.backend import FlashInferBackend

LN2 = math.log(2.0)
_NO_CACHE_YET = object()


class FlashInferImpl(AttentionImpl):
    """One layer. See ``forward``."""

    backend: FlashInferBackend

    def __init__(self, backend: FlashInferBackend, layer_name: str, **features: Unpack[LayerFeatures]) -> None:
        super().__init__(backend, layer_name, **features)
        for name, given in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if given is not None:
                raise ValueError(f"{name}: given, but flashinfer takes none")
        scales = {"k_scale": float(self.k_scale), "v_scale": float(self.v_scale)}
        fp8 = torch.finfo(backend.shape.cache_dtype).bits == 8
        if not fp8 and (self.k_scale, self.v_scale) != (1.0, 1.0):
            raise ValueError(
                f"k_scale: {self.k_scale} and v_scale {self.v_scale} found; only an fp8 cache is kept with scales"
            )
        if self.logits_soft_cap is not None and backend.decode_kernel == "xqa":
            raise ValueError("logits_soft_cap: decode=xqa has none; create the backend with another kernel of decodes")
        if self.sliding_window is not None and fp8 and backend.decode_kernel == "xqa":
            raise ValueError(
                f"sliding_window: decode=xqa {XQA_WINDOW_FP8}; create the backend with another kernel of decodes"
            )
        backend.check_modules(self.sliding_window, self.logits_soft_cap)
        self._scales = {name: factor for name, factor in scales.items() if factor != 1.0}
        self._write = CacheWriter(self.k_scale, self.v_scale)
        self._kv_cache: Any = _NO_CACHE_YET
        self._caches: tuple[Tensor, Tensor]
        self._slots: tuple[Tensor, Tensor]
        # Last: a layer that is refused leaves no plans in the backend.
        self._plans = backend.plans_of(PlanKey(self.scale, self.sliding_window, self.logits_soft_cap))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
    ) -> Tensor:
        """Writes the step's keys and values to their slots, and attends; see the base class.

        ``kv_cache`` is ``[blocks + 1, 2, block_size, num_kv_heads, head_size]`` (HND: heads before tokens), a pair of
        such halves, or None in a profiling run, whose output is 0. ``metadata`` is of the step planned last, or of a
        captured size. The output of tokens of padding is not defined.
        """
        return self._attend(query, key, value, kv_cache, metadata, output, None)

    def forward_with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``forward``, and the natural logarithm of each softmax's sum, float32 (T, num_heads)."""
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        return self._attend(query, key, value, kv_cache, metadata, output, lse), lse.mul_(LN2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        if kv_cache is not self._kv_cache:
            if kv_cache is None:
                return query.new_zeros(query.shape) if output is None else output.zero_()
            self._take(kv_cache, metadata)
        step = self._plans.step
        if step.metadata() is not metadata:
            step = self._plans.find(metadata)
        self._write(key, value, *self._slots, metadata.slot_mapping)
        if output is None:
            output = query.new_empty(query.shape)
        target = output if output.is_contiguous() else query.new_empty(query.shape)
        caches, scales, count = self._caches, self._scales, query.shape[0]
        for run, start, stop in step.parts:
            if stop - start == count:
                part, out = query, target
            else:
                part, out = query[start:stop], target[start:stop]
            if lse is None:
                run(part, caches, out=out, **scales)
            else:
                lse[start:stop] = run(part, caches, out=out, return_lse=True, **scales)[1]
        if target is not output:
            output.copy_(target)
        return output

    def _take(self, kv_cache: Any, metadata: AttentionMetadata) -> None:
        """Keeps views of the layer's cache: as the kernels take it, and as slots address it."""
        if isinstance(kv_cache, Tensor):
            if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
                raise ValueError(
                    f"kv_cache: shape {tuple(kv_cache.shape)} found; expected (blocks, 2, ...) or a pair of halves"
                )
            keys, values = kv_cache.unbind(1)
        else:
            keys, values = kv_cache
        shape, hnd = self.backend.shape, self.backend.shape.layout == "HND"
        sizes = shape.block_size, shape.num_kv_heads, shape.head_size
        wanted = (sizes[1], sizes[0], sizes[2]) if hnd else sizes
        for half in (keys, values):
            if half.dim() != 4 or tuple(half.shape[1:]) != wanted or half.dtype != shape.cache_dtype:
                raise ValueError(
                    f"kv_cache: {half.dtype} {tuple(half.shape)} found; expected {shape.cache_dtype} (blocks, "
                    f"{', '.join(map(str, wanted))}), layout {shape.layout}"
                )
        if keys.stride() != values.stride():
            raise ValueError(
                f"kv_cache: strides {keys.stride()} of keys and {values.stride()} of values found; they must be equal"
            )
        check_cache(metadata, len(keys))
        self._caches = keys, values
        self._slots = (keys.transpose(1, 2), values.transpose(1, 2)) if hnd else (keys, values)
        self._kv_cache = kv_cache
