"""FlashAttention 4 (``flash-attn-4``, ``flash_attn.cute``): one layer's calls, by its public function."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from torch import Tensor

from attn_flash.parts import Part
from attn_flash.rows import Rows

Answer = tuple[Tensor, Tensor | None]


def load() -> Any:
    """The module that holds ``flash_attn_varlen_func``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a dozen, of the DSL that it is written in
        return import_module("flash_attn.cute")


class Layer:
    """The calls of one layer. Outputs are (tokens, heads, head size), log-sum-exps float32 (tokens, heads)."""

    together = True
    """One call for decodes and prefills: the query heads of a group share their keys in every call."""
    splits_by_width = False
    """The table may be wider than needed."""

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

    def decode(
        self, query: Tensor, caches: tuple[Tensor, Tensor], rows: Rows, part: Part, positions: Any, with_lse: bool
    ) -> Answer:
        """``query`` is (rows, tokens of a row, heads, head size)."""
        output, lse = self._varlen(
            query, *caches, seqused_k=rows.lengths, page_table=rows.table, max_seqlen_q=part.query_len,
            max_seqlen_k=part.max_seq_len, return_lse=with_lse, **self._fixed,
        )  # fmt: skip
        return output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1) if with_lse else None

    def paged(
        self, query: Tensor, caches: tuple[Tensor, Tensor], rows: Rows, part: Part, positions: Any, with_lse: bool
    ) -> Answer:
        """``query`` is the whole step's (tokens, heads, head size); other rows of the answer hold anything."""
        output, lse = self._varlen(
            query, *caches, cu_seqlens_q=rows.starts, seqused_k=rows.lengths, page_table=rows.table,
            max_seqlen_q=part.max_query_len, max_seqlen_k=part.max_seq_len, return_lse=with_lse, **self._fixed,
        )  # fmt: skip
        return output, lse.transpose(0, 1) if with_lse else None

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, part: Part, positions: Any,
        with_lse: bool,
    ) -> Answer:  # fmt: skip
        """Attention over ``key`` and ``value`` (tokens, key/value heads, head size), rows by ``key_starts``."""
        output, lse = self._varlen(
            query, key, value, cu_seqlens_q=starts, cu_seqlens_k=key_starts, max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len, return_lse=with_lse, **self._fixed,
        )  # fmt: skip
        return output, lse.transpose(0, 1) if with_lse else None
