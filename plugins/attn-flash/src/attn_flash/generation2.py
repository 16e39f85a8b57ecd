"""FlashAttention 2 (``flash_attn``, 2.8): one layer's calls, by its public functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from attn_flash.parts import Part
from attn_flash.rows import Rows


def load() -> Any:
    """The module that holds ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func``."""
    return import_module("flash_attn")


class Layer:
    """The calls of one layer.

    ``synchronises``: the decode function of this version waits for the device (it reads the longest length there), so
    decodes take the other one.
    """

    together = False
    """Not one call for decodes and prefills: that would read a decode's keys once for every query head, unsplit."""
    splits_by_width = True
    """A decode's keys are split among the cores as if the table were full, so it is to be no wider than needed."""
    pairs = False
    """Whether the output comes in a tuple though no log-sum-exp is asked for."""
    rows_without_keys = ("decode", "packed")
    """Not ``paged``: the logarithm of such a row is written outside of its tensor."""

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
        self.by_row = not synchronises
        self._fixed: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (left, 0 if causal and left >= 0 else left),
            "softcap": logits_soft_cap or 0.0,
            "alibi_slopes": alibi_slopes,
        }

    def arguments(self, part: Part, rows: Rows, with_lse: bool = False) -> dict[str, Any]:
        """What the call of a part is given beside the tensors of a layer and what is fixed for it: good for all layers
        of a step.
        """
        if part.entry == "decode" and not self._synchronises:
            return {"cache_seqlens": rows.lengths, "block_table": rows.table, "return_softmax_lse": with_lse}
        starts, longest_query = rows.starts, max(2, part.max_query_len)  # 1 means rows of exactly one token each
        if part.entry == "decode":
            if part.query_len == 1 and not with_lse:  # such rows are split among the cores; their logarithm is not
                longest_query = 1  # laid out by tokens
            starts = starts - part.start if part.start else starts
        given: dict[str, Any] = {
            "cu_seqlens_q": starts, "max_seqlen_q": longest_query, "max_seqlen_k": part.max_seq_len,
            "return_attn_probs": with_lse,
        }  # fmt: skip
        if part.entry == "packed":
            return given | {"cu_seqlens_k": rows.fresh}
        return given | {"cu_seqlens_k": rows.sums, "block_table": rows.table}

    def bound(self, part: Part, arguments: dict[str, Any], caches: tuple[Tensor, Tensor] | None) -> Callable[..., Any]:
        """The call of a part. It takes the step's query (tokens, heads, head size), and for ``packed`` key and value;
        for ``decode`` the part's query, as (rows, tokens of a row, heads, head size) where ``by_row``.
        """
        if part.entry == "packed":
            return partial(self._varlen, **arguments, **self._fixed)
        keys, values = _there(caches)
        if part.entry == "decode" and not self._synchronises:
            return partial(self._with_kvcache, k_cache=keys, v_cache=values, **arguments, **self._fixed)
        return partial(self._varlen, k=keys, v=values, **arguments, **self._fixed)

    def answer(self, found: Any, part: Part, capacity: int, positions: Any) -> tuple[Tensor, Tensor]:
        """Output (tokens, heads, head size) and log-sum-exp (tokens, heads) of a call that was asked for both.

        ``capacity``: tokens that the table has room for. ``positions``: the step's, read where the layer has slopes.
        """
        output, lse = found[0], found[1]
        if output.dim() == 4:
            output, lse = output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
            room = capacity
        else:
            lse, room = lse.transpose(0, 1), part.max_seq_len
        if self._slopes is not None and self._causal and not 0 <= self._left < room:
            # A causal layer's slopes count from the sequence's first token, not from the query (those of a window that
            # is narrower than ``room`` do). The output is the same; the logarithm is too large by slope x position.
            mine = lse if len(lse) == part.stop - part.start else lse[part.start : part.stop]
            mine -= positions[part.start : part.stop].unsqueeze(1) * self._slopes
        return output, lse


def _there(caches: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    if caches is None:
        raise ValueError("kv_cache: None found; a step of requests that have context, or decodes, needs the cache")
    return caches
