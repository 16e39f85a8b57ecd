"""Attention of one query in float64, over the keys that a mask leaves: no blocks, slots or batches."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, distances: Tensor, *, scale: float,
    logits_soft_cap: float | None = None, alibi_slopes: list[float] | None = None, sinks: list[float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output (heads, value size) and log-sum-exp (heads,) of ``query`` (heads, size), and the output of the values'
    magnitudes, (heads, value size): a kernel that rounds its probabilities is off by a share of these.

    ``keys`` (n, key-value heads, size) and ``values``; ``visible`` bool (n,) and ``distances`` (n,) are of the keys.
    """
    heads, each = len(query), len(query) // keys.shape[1]
    keys, values = (one[visible].repeat_interleave(each, dim=1) for one in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query, keys) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    if alibi_slopes is not None:
        scores = scores - torch.tensor(alibi_slopes, dtype=torch.float64)[:, None] * distances[visible]
    if sinks is not None:  # a key that carries no value
        scores = torch.cat((scores, torch.tensor(sinks, dtype=torch.float64)[:, None]), dim=1)
        values = torch.cat((values, torch.zeros(1, heads, values.shape[2], dtype=torch.float64)))
    if not scores.shape[1]:
        nothing = torch.zeros(heads, values.shape[2], dtype=torch.float64)
        return nothing, torch.full((heads,), -torch.inf), nothing
    sums = scores.logsumexp(1)
    weights = torch.exp(scores - sums[:, None]).nan_to_num(0.0)  # where there is nothing but a sink of weight 0
    output, magnitudes = (torch.einsum("hn,nhd->hd", weights, one) for one in (values, values.abs()))
    return output, sums, magnitudes
