"""FlashAttention 2 (``flash_attn``, 2.8): one layer's calls, by its public functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from attn_flash.segments import Segment

Call = Callable[[Tensor, Any, Any], Tensor]


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
    captured_by_starts = False
    """Captured rows are of one length."""
    splits_by_width = True
    """A decode's keys are split among the cores as if the table were full, so it is to be no wider than needed."""
    rows_without_keys: tuple[str, ...] = ("decode", "packed")
    """Not ``paged``: the logarithm of such a row is written outside of its tensor. Nor ``decode`` by the same call."""

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
        self._with_kvcache, self._varlen = library.flash_attn_with_kvcache, library.flash_attn_varlen_func
        left = -1 if sliding_window is None else sliding_window - 1
        self._left, self._causal, self._slopes, self._synchronises = left, causal, alibi_slopes, synchronises
        if synchronises:
            self.rows_without_keys = ("packed",)
        self._fixed: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (left, 0 if causal and left >= 0 else left),
            "softcap": logits_soft_cap or 0.0,
            "alibi_slopes": alibi_slopes,
        }

    def sinks_changed(self) -> None:
        """Nothing: the call reads the layer's own."""

    def arguments(self, segment: Segment, with_lse: bool = False) -> dict[str, Any]:
        """What the call of a segment is given beside the tensors of a layer and what is fixed for it: good for all
        layers of a step.
        """
        if segment.entry == "decode" and not self._synchronises:
            return {
                "cache_seqlens": segment.lengths, "block_table": segment.block_table, "return_softmax_lse": with_lse
            }  # fmt: skip
        starts, longest_query = segment.query_starts, max(2, segment.max_query_len)
        if segment.entry == "decode":  # a longest query of 1 means rows of exactly one token each
            if segment.query_len == 1 and not with_lse:  # such rows are split among the cores; their logarithm is not
                longest_query = 1  # laid out by tokens
            starts = starts - segment.start if segment.start else starts
        given: dict[str, Any] = {
            "cu_seqlens_q": starts, "max_seqlen_q": longest_query, "max_seqlen_k": segment.max_seq_len,
            "return_attn_probs": with_lse,
        }  # fmt: skip
        if segment.entry == "packed":
            return given | {"cu_seqlens_k": segment.key_starts}
        return given | {"cu_seqlens_k": segment.key_sums, "block_table": segment.block_table}

    def bound(self, segment: Segment, arguments: dict[str, Any], caches: tuple[Tensor, Tensor] | None) -> Call:
        """The call of a segment: ``call(query, key, value)`` gives the output (tokens, heads, head size).

        It takes the step's query, and for ``packed`` this step's keys and values, and gives as many tokens, of which
        the segment's are written; for ``decode`` it takes and gives the segment's tokens alone.
        """
        entry, fixed, varlen = segment.entry, self._fixed, self._varlen
        if entry == "packed":
            return partial(varlen, **arguments, **fixed)
        keys, values = given_caches(caches)
        if entry == "paged" or self._synchronises:  # made once, most of them: merging arguments ahead would cost more
            return lambda query, key, value: varlen(query, keys, values, **arguments, **fixed)
        call = partial(self._with_kvcache, k_cache=keys, v_cache=values, **arguments, **fixed)
        if segment.query_len == 1:
            return lambda query, key, value: call(query.unsqueeze(1)).view_as(query)
        rows = segment.last - segment.first, segment.query_len
        return lambda query, key, value: call(query.view(*rows, *query.shape[1:])).flatten(0, 1)

    def with_lse(
        self, segment: Segment, caches: tuple[Tensor, Tensor] | None, tensors: tuple[Tensor, Any, Any], places: Any
    ) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp (tokens, heads) of a segment, for ``tensors`` (query, key, value) as
        ``bound``'s call takes them. ``places``: of the step's tokens, where the key of each
        stands among its row's; read where the layer has slopes.
        """
        call, query = self._call(segment, self.arguments(segment, True), caches), tensors[0]
        if segment.entry == "packed":
            output, lse = call(*tensors)[:2]
        elif segment.entry == "paged" or self._synchronises:
            output, lse = call(query)[:2]
        else:
            output, lse = call(query.view(-1, segment.query_len, *query.shape[1:]))[:2]
        if output.dim() == 4:
            output, lse = output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
            room = segment.block_table.shape[1] * caches[0].shape[1] if caches is not None else 0
        else:
            lse, room = lse.transpose(0, 1), segment.max_seq_len
        if self._slopes is not None and self._causal and not 0 <= self._left < room:
            # A causal layer's slopes count from the row's first key, not from the query (those of a window that
            # is narrower than ``room`` do). The output is the same; the logarithm is too large by slope x place.
            mine = lse if len(lse) == segment.stop - segment.start else lse[segment.tokens]
            mine -= places[segment.tokens].unsqueeze(1) * self._slopes
        return output, lse

    def _call(
        self, segment: Segment, arguments: dict[str, Any], caches: tuple[Tensor, Tensor] | None
    ) -> Callable[..., Any]:
        """The library's function with all but the step's tensors. Rows of ``decode`` are its query's first axis."""
        if segment.entry == "packed":
            return partial(self._varlen, **arguments, **self._fixed)
        keys, values = given_caches(caches)
        if segment.entry == "decode" and not self._synchronises:
            return partial(self._with_kvcache, k_cache=keys, v_cache=values, **arguments, **self._fixed)
        return partial(self._varlen, k=keys, v=values, **arguments, **self._fixed)


def given_caches(caches: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """``caches``; ValueError naming ``kv_cache`` for None."""
    if caches is None:
        raise ValueError("kv_cache: None found; a step of requests that have context, or decodes, needs the cache")
    return caches
