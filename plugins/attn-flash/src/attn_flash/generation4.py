"""FlashAttention 4 (``flash-attn-4``, ``flash_attn.cute``): one layer's calls, by its public function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from attn_flash.generation2 import Call, given_caches
from attn_flash.segments import Segment


def load() -> Any:
    """The module that holds ``flash_attn_varlen_func``. A remark of its compiler's is not shown."""
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a dozen, of the DSL that it is written in
        return import_module("flash_attn.cute")


class Layer:
    """The calls of one layer. Its members are those of ``generation2.Layer``."""

    together = True
    """One call for decodes and prefills: the query heads of a group share their keys in every call."""
    splits_by_width = False
    """The table may be wider than needed."""
    captured_by_starts = True
    """Rows of a captured size of several tokens each may be shorter: their call is told where each begins."""
    rows_without_keys = ("packed",)
    """Only there: of a page table such a row reads the column before the first, for the first row before the table."""

    def __init__(
        self,
        library: Any,
        *,
        scale: float,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        causal: bool,
        synchronises: bool = False,
        device: str = "cpu",
    ) -> None:
        self._varlen = library.flash_attn_varlen_func
        left = None if sliding_window is None else sliding_window - 1
        self._fixed: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (left, 0 if causal and left is not None else left),
            "softcap": logits_soft_cap or 0.0,
            "learnable_sink": sinks,
        }

    def sinks_changed(self) -> None:
        """Nothing: the call reads the layer's own."""

    def arguments(self, segment: Segment, with_lse: bool = False) -> dict[str, Any]:
        """What the call of a segment is given, as far as all layers of a step share it."""
        given: dict[str, Any] = {
            "max_seqlen_q": segment.max_query_len, "max_seqlen_k": segment.max_seq_len, "return_lse": with_lse
        }  # fmt: skip
        if segment.entry == "packed":
            return given | {"cu_seqlens_q": segment.query_starts, "cu_seqlens_k": segment.key_starts}
        given |= {"seqused_k": segment.lengths, "page_table": segment.block_table}
        return given | {"cu_seqlens_q": segment.query_starts} if segment.entry == "paged" else given

    def bound(self, segment: Segment, arguments: dict[str, Any], caches: tuple[Tensor, Tensor] | None) -> Call:
        """The call of a segment. Decodes are given as (rows, tokens of a row, heads, head size): the faster form, by a
        fifth for 256 requests. The output comes in a tuple, though no log-sum-exp is asked for.
        """
        entry, fixed, varlen = segment.entry, self._fixed, self._varlen
        if entry == "packed":
            keys_of = segment.packed_keys
            return lambda query, key, value: varlen(query, *keys_of(key, value), **arguments, **fixed)[0]
        keys, values = given_caches(caches)
        if entry == "paged":
            return lambda query, key, value: varlen(query, keys, values, **arguments, **fixed)[0]
        call = partial(varlen, k=keys, v=values, **arguments, **fixed)
        if segment.query_len == 1:
            return lambda query, key, value: call(query.unsqueeze(1))[0].view_as(query)
        rows = segment.last - segment.first, segment.query_len
        return lambda query, key, value: call(query.view(*rows, *query.shape[1:]))[0].flatten(0, 1)

    def with_lse(
        self, segment: Segment, caches: tuple[Tensor, Tensor] | None, tensors: tuple[Tensor, Any, Any], places: Any
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp (tokens, heads) of a segment."""
        call, query = self._call(segment, self.arguments(segment, True), caches), tensors[0]
        if segment.entry == "packed":
            output, lse = call(query, *segment.packed_keys(*tensors[1:]))
        elif segment.entry == "paged":
            output, lse = call(query)
        else:
            output, lse = call(query.view(-1, segment.query_len, *query.shape[1:]))
            return output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        return output, lse.transpose(0, 1)

    def _call(
        self, segment: Segment, arguments: dict[str, Any], caches: tuple[Tensor, Tensor] | None
    ) -> Callable[..., Any]:
        if segment.entry == "packed":
            return partial(self._varlen, **arguments, **self._fixed)
        keys, values = given_caches(caches)
        return partial(self._varlen, k=keys, v=values, **arguments, **self._fixed)
