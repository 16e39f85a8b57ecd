"""FlashAttention 2 (``flash_attn``, 2.8): one layer's calls, by its public functions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from attn_flash.parts import Part
from attn_flash.rows import Rows

Answer = tuple[Tensor, Tensor | None]


def load() -> Any:
    """The module that holds ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``."""
    return import_module("flash_attn")


class Layer:
    """The calls of one layer. Outputs are (tokens, heads, head size), log-sum-exps float32 (tokens, heads).

    ``synchronises``: the decode function of this version waits for the device (it reads the longest length there), so
    decodes take the other one.
    """

    together = False
    """Not one call for decodes and prefills: that would read a decode's keys once for every query head, unsplit."""
    splits_by_width = True
    """A decode's keys are split among the cores as if the table were full, so it is to be no wider than needed."""

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
        self._with_kvcache, self._varlen = library.flash_attn_with_kvcache, library.flash_attn_varlen_func
        left = -1 if sliding_window is None else sliding_window - 1
        self._left, self._causal, self._slopes, self._synchronises = left, causal, alibi_slopes, synchronises
        self._fixed: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (left, 0 if causal and left >= 0 else left),
            "softcap": logits_soft_cap or 0.0,
            "alibi_slopes": alibi_slopes,
        }

    def decode(
        self, query: Tensor, caches: tuple[Tensor, Tensor], rows: Rows, part: Part, positions: Any, with_lse: bool
    ) -> Answer:
        """``query`` is (rows, tokens of a row, heads, head size)."""
        if self._synchronises:
            # Rows of one token are split among the cores here too; their log-sum-exp is laid out otherwise.
            bound = 1 if part.query_len == 1 and not with_lse else max(2, part.query_len)
            if part.start:  # ``query`` is this part's
                rows = rows._replace(starts=rows.starts - part.start)
            return self._cached(query.flatten(0, 1), caches, rows, part, bound, positions, with_lse)
        found = self._with_kvcache(
            query,
            *caches,
            cache_seqlens=rows.lengths,
            block_table=rows.table,
            return_softmax_lse=with_lse,
            **self._fixed,
        )
        if not with_lse:
            return found.flatten(0, 1), None
        capacity = rows.table.shape[1] * caches[0].shape[1]
        lse = found[1].transpose(1, 2).flatten(0, 1)
        return found[0].flatten(0, 1), self._unshifted(lse, part, capacity, positions)

    def paged(
        self, query: Tensor, caches: tuple[Tensor, Tensor], rows: Rows, part: Part, positions: Any, with_lse: bool
    ) -> Answer:
        """``query`` is the whole step's (tokens, heads, head size); other rows of the answer hold anything."""
        return self._cached(query, caches, rows, part, max(2, part.max_query_len), positions, with_lse)

    def packed(
        self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, part: Part, positions: Any,
        with_lse: bool,
    ) -> Answer:  # fmt: skip
        """Attention over ``key`` and ``value`` (tokens, key/value heads, head size), rows by ``key_starts``."""
        bound = max(2, part.max_query_len)  # 1 means rows of exactly one token each
        return self._called(query, key, value, starts, key_starts, part, bound, positions, with_lse)

    def _cached(
        self, query: Tensor, caches: tuple[Tensor, Tensor], rows: Rows, part: Part, bound: int, positions: Any,
        with_lse: bool,
    ) -> Answer:  # fmt: skip
        table = {"block_table": rows.table}
        return self._called(query, *caches, rows.starts, rows.sums, part, bound, positions, with_lse, **table)

    def _called(
        self, query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, key_starts: Tensor, part: Part, bound: int,
        positions: Any, with_lse: bool, **table: Tensor,
    ) -> Answer:  # fmt: skip
        found = self._varlen(
            query, keys, values, starts, key_starts, bound, part.max_seq_len, return_attn_probs=with_lse,
            **table, **self._fixed,
        )  # fmt: skip
        if not with_lse:
            return found, None
        return found[0], self._unshifted(found[1].transpose(0, 1), part, part.max_seq_len, positions)

    def _unshifted(self, lse: Tensor, part: Part, capacity: int, positions: Any) -> Tensor:
        """A causal layer's slopes count from the sequence's first token, not from the query. The output is the same,
        the logarithm is too large by slope times position. A window narrower than ``capacity`` counts from the query.
        """
        if self._slopes is not None and self._causal and not 0 <= self._left < capacity:
            mine = lse if len(lse) == part.stop - part.start else lse[part.start : part.stop]
            mine -= positions[part.start : part.stop].unsqueeze(1) * self._slopes
        return lse
