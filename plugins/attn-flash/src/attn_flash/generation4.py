"""FlashAttention 4 (``flash-attn-4``, ``flash_attn.cute``): one layer's calls, by its public function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from attn_flash.parts import Part
from attn_flash.rows import Rows


def load() -> Any:
    """The module that holds ``flash_attn_varlen_func``. A remark of its compiler's is not shown."""
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a dozen, of the DSL that it is written in
        return import_module("flash_attn.cute")


class Layer:
    """The calls of one layer. ``arguments``, ``bound`` and ``answer`` are as in ``generation2``."""

    together = True
    """One call for decodes and prefills: the query heads of a group share their keys in every call."""
    splits_by_width = False
    """The table may be wider than needed."""
    pairs = True
    """The output comes in a tuple."""
    rows_without_keys = ("packed",)
    """Only there: of a page table such a row reads the column before the first, for the first row before the table."""
    by_row = True
    """Decodes are taken as (rows, tokens of a row, heads, head size): the faster form, by a fifth for 256 requests."""

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

    def arguments(self, part: Part, rows: Rows, with_lse: bool = False) -> dict[str, Any]:
        """What the call of a part is given, as far as all layers of a step share it."""
        given: dict[str, Any] = {
            "max_seqlen_q": part.max_query_len, "max_seqlen_k": part.max_seq_len, "return_lse": with_lse
        }  # fmt: skip
        if part.entry == "packed":
            return given | {"cu_seqlens_q": rows.starts, "cu_seqlens_k": rows.fresh}
        given |= {"seqused_k": rows.lengths, "page_table": rows.table}
        return given | {"cu_seqlens_q": rows.starts} if part.entry == "paged" else given

    def bound(self, part: Part, arguments: dict[str, Any], caches: tuple[Tensor, Tensor] | None) -> Callable[..., Any]:
        """The call of a part."""
        if part.entry == "packed":
            return partial(self._varlen, **arguments, **self._fixed)
        if caches is None:
            raise ValueError("kv_cache: None found; a step of requests that have context, or decodes, needs the cache")
        return partial(self._varlen, k=caches[0], v=caches[1], **arguments, **self._fixed)

    def answer(self, found: Any, part: Part, capacity: int, positions: Any) -> tuple[Tensor, Tensor]:
        """Output (tokens, heads, head size) and log-sum-exp (tokens, heads) of a call that was asked for both."""
        output, lse = found
        if output.dim() == 4:
            return output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        return output, lse.transpose(0, 1)
