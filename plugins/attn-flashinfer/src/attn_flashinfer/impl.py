"""One layer's attention: the cache is written, then each part of the step runs where it was planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from attn_flashinfer.checks import XQA_WINDOW_FP8
from attn_flashinfer.pages import check_cache
from attn_flashinfer.profiling import has_no_pages, is_profiled, profiled_step
from attncore import AttentionImpl, AttentionMetadata, CacheWriter, LayerFeatures, PlanKey, SinksByLse
from attncore.graphs import refuse_while_capturing

if TYPE_CHECKING:
    from attn_flashinfer.backend import FlashInferBackend
    from attn_flashinfer.plans import StepPlan

LN2 = math.log(2.0)
_NO_CACHE_YET = object()


class FlashInferImpl(AttentionImpl):
    """One layer. See ``forward``."""

    backend: FlashInferBackend
    not_taken: tuple[str, ...] = ("alibi_slopes",)
    values_in_keys = False
    """Whether the values are a part of the keys: ``value`` is not read."""
    _xqa_scales: dict[str, Any]

    def __init__(self, backend: FlashInferBackend, layer_name: str, **features: Unpack[LayerFeatures]) -> None:
        super().__init__(backend, layer_name, **features)
        for name in self.not_taken:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: given, but flashinfer takes none here")
        fp8 = torch.finfo(backend.shape.cache_dtype).bits == 8
        if self.logits_soft_cap is not None and backend.decode_kernel == "xqa":
            raise ValueError("logits_soft_cap: decode=xqa has none; create the backend with another kernel of decodes")
        if self.sliding_window is not None and fp8 and backend.decode_kernel == "xqa":
            raise ValueError(
                f"sliding_window: decode=xqa {XQA_WINDOW_FP8}; create the backend with another kernel of decodes"
            )
        if backend.decode_kernel == "xqa" and not isinstance(self.k_scale, float) and self.k_scale.numel() > 1:
            raise ValueError(
                "k_scale: decode=xqa reads one scale for all heads; create the backend with another kernel of decodes"
            )
        backend.check_modules(self.sliding_window, self.logits_soft_cap)
        self.scales_changed()
        # The wrappers' kernels have none; their logarithms of the softmax's sum say what a sink takes of it.
        self._add_sinks = SinksByLse(self.sinks, base2=True) if isinstance(self.sinks, Tensor) else None
        self._kv_cache: Any = _NO_CACHE_YET
        self._parts: tuple[Tensor, ...] = ()
        self._places: list[int] = []
        self._caches: Any
        self._write_into: Callable[[Tensor, Tensor, Tensor], None]
        # Last: a layer that is refused leaves no plans in the backend.
        self._plans = backend.plans_of(PlanKey(self.scale, self.sliding_window, self.logits_soft_cap))

    def scales_changed(self) -> None:
        """See the base class.

        The kernels take numbers: ``run`` multiplies ``sm_scale`` by ``k_scale`` on the host, where a tensor would have
        to be read, and there is one for all heads. A tensor k_scale is therefore multiplied into the query, whose
        scores with the keys of the cache are the same then, and v_scale into the output, of which it is a factor: two
        small launches, which read the scales on the device. The log-sum-exp is that of the scores, and needs nothing.
        """
        self._new_writer(CacheWriter(self.k_scale, self.v_scale))
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        self._scales = {name: scale for name, scale in scales.items() if isinstance(scale, float) and scale != 1.0}
        self._of_query = self._of_output = None
        self._xqa_scales = self._scales
        if not isinstance(self.k_scale, float):
            self._of_query = self.k_scale.view(-1, 1, 1)
            if self.k_scale.numel() == 1:
                # XQA rounds queries to the cache's fp8, and cuts off what is too large for it, but takes a tensor.
                self._xqa_scales = {**self._scales, "k_scale": self.k_scale.view(-1)}
        if not isinstance(self.v_scale, float):
            self._of_output = self.v_scale.view(-1, 1, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
        *,
        write: bool = True,
    ) -> Tensor:
        """Writes the step's keys and values to their slots, and attends; see the base class.

        ``kv_cache`` is ``[blocks, 2, block_size, num_kv_heads, head_size]`` (HND: heads before tokens), a pair of views
        ``[blocks, block_size, num_kv_heads, head_size]``, or None in a profiling run, which attends over the step's own
        keys in a cache of its own, and so takes the memory of a step of these lengths. A step without pages, as of
        ``new_tokens_metadata``, does so whatever ``kv_cache`` is. ``metadata`` is of the step planned last, or of a
        captured size. The output of tokens of padding is not defined. Every other key is read in the cache, so that
        without ``write`` key and value are not needed; a profiling run without them gives 0.
        """
        return self._attend(query, key, value, kv_cache, metadata, output, None, write)

    def forward_with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None = None,
        *,
        write: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """``forward``, and the natural logarithm of each softmax's sum, float32 (T, num_heads)."""
        self.check_order(query, metadata)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        return self._attend(query, key, value, kv_cache, metadata, output, lse, write), lse.mul_(LN2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        metadata: AttentionMetadata,
        output: Tensor | None,
        lse: Tensor | None,
        write: bool,
    ) -> Tensor:
        if write is not True:
            write = self.check_write(write)
        step, caches = self._plans.step, None
        if kv_cache is not None:
            if kv_cache is not self._kv_cache or [part.data_ptr() for part in self._parts] != self._places:
                self.check_order(query, metadata)
                self._take(kv_cache, metadata)
            caches = self._caches
        if caches is None or step.metadata() is not metadata:
            self.check_order(query, metadata)
            if caches is None or has_no_pages(metadata):
                found = self._over_own_keys(key, value, metadata, write)
                if found is None:
                    return (self._empty(query) if output is None else output).zero_()
                (step, caches), write = found, False
            else:
                step = self._plans.find(metadata)
        if step.parts and step.parts[-1].stop > query.shape[0]:  # a kernel would read and write beyond its rows
            raise ValueError(f"query: shape {tuple(query.shape)} found; the metadata has {step.parts[-1].stop}")
        if write:
            self._write_into(key, key if self.values_in_keys else value, metadata.slot_mapping)
        if output is None:
            output = self._empty(query)
        target = output if output.is_contiguous() else self._empty(query)
        given = query
        if self._of_query is not None:
            scaled = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            torch.mul(self._of_kv_heads(query.detach()), self._of_query, out=self._of_kv_heads(scaled))
            query = scaled
        scales, count, add_sinks = self._scales, query.shape[0], self._add_sinks
        for run, start, stop, by_xqa in step.parts:
            whole = stop - start == count
            out = target if whole else target[start:stop]
            if by_xqa and lse is None:
                part = given if "k_scale" in self._xqa_scales else query
                run(part if whole else part[start:stop], caches, out=out, sinks=self.sinks, **self._xqa_scales)
                continue
            part = query if whole else query[start:stop]
            if lse is None and add_sinks is None:
                run(part, caches, out=out, **scales)
                continue
            found = run(part, caches, out=out, return_lse=True, **scales)[1]
            if add_sinks is not None:
                add_sinks(out, found)
            if lse is not None:
                lse[start:stop] = found
        if self._of_output is not None:
            self._of_kv_heads(target).mul_(self._of_output)
        if target is not output:
            output.copy_(target)
        return output

    def _over_own_keys(
        self, key: Tensor | None, value: Tensor | None, metadata: AttentionMetadata, write: bool
    ) -> tuple[StepPlan, Any] | None:
        """The plan of a step that no cache holds, and the cache that its own keys are written to; None where nothing is
        attended: it has no tokens, or their keys are not given.
        """
        if not int(metadata.host.query_start_loc[-1]) or (key is None and not write):
            return None
        if not is_profiled(metadata):
            raise ValueError("kv_cache: None found; a step of requests that have context needs the cache")
        refuse_while_capturing(self.backend.config.device, "forward")
        profiled = profiled_step(self.backend, self._writer, key, value, metadata)
        planned = self.backend.plan_own_keys(self._plans, profiled, metadata.max_query_len)
        return planned, self._for_kernels(*profiled[2:])

    def _new_writer(self, writer: CacheWriter) -> None:
        self._writer, self._kv_cache = writer, _NO_CACHE_YET  # the next call takes the cache anew, for this writer

    def _empty(self, query: Tensor) -> Tensor:
        """What the output of ``query`` takes."""
        return query.new_empty(query.shape)

    def _of_kv_heads(self, tensor: Tensor) -> Tensor:
        """(T, num_heads, size) as a view (T, num_kv_heads, heads that share one, size)."""
        count, heads, size = tensor.shape
        kv_heads = self.backend.shape.num_kv_heads
        return tensor.view(count, kv_heads, heads // kv_heads, size)

    def _for_kernels(self, keys: Tensor, values: Tensor) -> Any:
        """Views of a cache by slots, as the kernels take them."""
        hnd = self.backend.shape.layout == "HND"
        return (keys.transpose(1, 2), values.transpose(1, 2)) if hnd else (keys, values)

    def _take(self, kv_cache: Any, metadata: AttentionMetadata) -> None:
        """Keeps views of the layer's cache: as the kernels take it, and as slots address it."""
        keys, values = self.backend.kv_cache_views(kv_cache)
        if keys.stride() != values.stride():
            raise ValueError(
                f"kv_cache: strides {keys.stride()} of keys and {values.stride()} of values found; they must be equal"
            )
        check_cache(metadata, len(keys))
        caches = self._for_kernels(keys, values)
        write = self._writer.into(keys, keys if self.values_in_keys else values)
        parts = (kv_cache,) if isinstance(kv_cache, Tensor) else tuple(kv_cache)
        self._kv_cache = _NO_CACHE_YET  # until all is of this one: an interrupt may come in between
        self._caches, self._write_into = caches, write
        # A list may hold other tensors the next time: it is never taken for the cache that is known. A tensor may be
        # given other memory (``set_``, ``data``), where its views stay.
        self._parts, self._places = parts, [part.data_ptr() for part in parts]
        self._kv_cache = _NO_CACHE_YET if isinstance(kv_cache, list) else kv_cache
