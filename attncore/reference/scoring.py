"""Scores, masks and softmax of attention over tensors, in torch and float32: the arithmetic of ``reference``.

Two routes give the same numbers: ``fused`` is torch's scaled_dot_product_attention, for what it can say (scale,
causality, window); ``explicit`` writes the scores out, for soft caps, ALiBi, sinks and log-sum-exp. Both see keys only
through positions: causal, a key at a later position than the query is hidden; with a window, one ``sliding_window`` or
more positions away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attncore.ops.without_autocast import without_autocast


@dataclass(frozen=True)
class Scoring:
    """How scores are made. Slopes and sinks are float32 ``(num_kv_heads, heads a kv head)``, on the device."""

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    causal: bool = True
    with_lse: bool = False

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention can do it."""
        special = (self.logits_soft_cap, self.alibi_slopes, self.sinks)
        return not self.with_lse and all(one is None for one in special)

    def visible(self, first: int, last: int, num_keys: int) -> tuple[int, int]:
        """Where the positions begin and end, of ``num_keys``, that queries at positions ``first`` to ``last`` see."""
        window = self.sliding_window
        low = 0 if window is None else max(0, first - window + 1)
        if self.causal:
            return low, last + 1
        return low, num_keys if window is None else min(num_keys, last + window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    scoring: Scoring,
    on_path: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of ``query`` (b, q, heads, d) over ``key`` (b, k, kv heads, d) and ``value`` (b, k, kv heads, dv).

    Positions are int64, (b, q) and (b, k); ``on_path``, of draft trees, is bool (b, q, k) and False of keys that are
    hidden whatever their position; ``beside`` is bool, too, and True of keys in the query's span, which it sees
    whatever their position; the rest is float32. Returns (b, q, heads, dv) and, with ``with_lse``, the logarithm
    of the softmax's sums (b, q, heads), else None. Every query has to see at least one key.
    """
    distance = query_position.unsqueeze(2) - key_position.unsqueeze(1)
    if scoring.causal:
        hidden = distance < 0
        if on_path is not None:
            hidden |= ~on_path
    else:
        distance = distance.abs()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
    if scoring.sliding_window is not None:
        hidden |= distance >= scoring.sliding_window
    if beside is not None:
        hidden &= ~beside
        distance = distance.abs()
    with without_autocast(query.device):
        if scoring.plain:
            return fused(query, key, value, hidden, scoring), None
        return explicit(query, key, value, distance, hidden, scoring)


def fused(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scoring: Scoring) -> Tensor:
    """``attend`` by torch's scaled_dot_product_attention."""
    group = query.shape[2] // key.shape[2]
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
    result = scaled_dot_product_attention(
        _fold(query, key.shape[2]),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask.repeat(1, group, 1).unsqueeze(1),
        scale=scoring.scale,
    )
    return _unfold(result, group)


def explicit(
    query: Tensor, key: Tensor, value: Tensor, distance: Tensor, hidden: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """``attend`` with the scores written out: scale, soft cap, ALiBi, mask, softmax with sinks, log-sum-exp."""
    group = query.shape[2] // key.shape[2]
    score = _fold(query, key.shape[2]) * scoring.scale @ key.permute(0, 2, 3, 1)
    score = score.view(*score.shape[:2], group, *distance.shape[1:])  # (b, kv heads, heads a kv head, q, k)
    if scoring.logits_soft_cap is not None:
        score = score.div_(scoring.logits_soft_cap).tanh_().mul_(scoring.logits_soft_cap)
    if scoring.alibi_slopes is not None:
        score -= scoring.alibi_slopes[None, :, :, None, None] * distance[:, None, None]
    score.masked_fill_(hidden[:, None, None], -torch.inf)
    if scoring.sinks is not None:
        sink = scoring.sinks[None, :, :, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat((score, sink), dim=-1)
    lse = _unfold(score.logsumexp(dim=-1, keepdim=True).flatten(2, 3), group).squeeze(3) if scoring.with_lse else None
    weight = score.softmax(dim=-1)[..., : key.shape[1]]
    return _unfold(weight.flatten(2, 3) @ value.transpose(1, 2), group), lse


def _fold(query: Tensor, num_kv_heads: int) -> Tensor:
    """(b, q, heads, d) as (b, kv heads, heads a kv head * q, d): the heads that share keys become further queries."""
    batch, num_queries, num_heads, head_size = query.shape
    parted = query.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    return parted.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold(result: Tensor, group: int) -> Tensor:
    """The inverse of ``_fold``."""
    batch, num_kv_heads, rows, head_size = result.shape
    parted = result.reshape(batch, num_kv_heads, group, rows // group, head_size)
    return parted.permute(0, 3, 1, 2, 4).flatten(2, 3)
