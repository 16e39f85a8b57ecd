"""How far attention over an fp8 cache may lie from dense float32 attention: derived from the cache's format.

A format with m bits of mantissa rounds a number to one that is off by ``2 ** -(m + 1)`` of it at most, and by half of
its least step near 0. Times a scale ``s``, the error of a key's or a value's element x is at most ::

    e(x) = max(half_step * abs(x), half_least_step * s)

Keys enter the output through the scores ``s_j = c * sum_d q_d * k_jd`` and the weights ``w = softmax(s)``; values
directly. With ``o = sum_j w_j * v_j``, the derivative of the softmax gives to first order ::

    o' - o = sum_j w_j * (v_j - o) * c * sum_d q_d * dk_jd  +  sum_j w_j * dv_j

The terms are independent errors of mean 0 (each element is rounded by itself, to the nearest), each bounded as above.
The sum of the squares of their bounds is ::

    A ** 2 = sum_j w_j ** 2 * ((v_j - o) ** 2 * c ** 2 * sum_d q_d ** 2 * e(k_jd) ** 2  +  e(v_j) ** 2)

Of values that are a part of their keys the two terms of an element are one error: ``(a + b) ** 2 <= 2 * a ** 2 + 2 * b
** 2`` doubles it. A kernel may round queries and weights to the format too. These errors, ``q_d * half_step`` in each
product and ``w_j * half_step`` at each value, have the bounds of the keys' and of the values': they double it again.

Two limits follow:

- Each number: Hoeffding's inequality for bounded errors, ``P(abs(error) > t * A) <= 2 * exp(-t ** 2 / 2)``, with ``t``
  such that any of the numbers compared exceeds it by a chance of ``CHANCE``.
- All numbers: the variance of an error that is bounded by e is at most ``e ** 2 / 3`` where it lies evenly, so that the
  mean of the squared errors is at most a third of the mean of ``A ** 2``. The limit is that mean: what the two thirds
  leave is for the terms of second order, and for numbers whose errors are not independent. It is what finds a scale
  that is slightly wrong, which no single number shows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rounding(NamedTuple):
    """How a cache's dtype rounds: parts of a number, and near 0."""

    half_step: float
    half_least_step: float


ROUNDING = {
    "fp8_e4m3": Rounding(2.0**-4, 2.0**-10),  # 3 bits of mantissa, numbers below 2 ** -6 in steps of 2 ** -9
    "fp8_e5m2": Rounding(2.0**-3, 2.0**-17),  # 2 bits, below 2 ** -14 in steps of 2 ** -16
}
CHANCE = 1e-6
"""That one of the numbers of a step is beyond its limit where nothing is wrong."""


def squared_bounds(
    rounding: Rounding,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    k_scale: Tensor,
    v_scale: Tensor,
    shared: bool = False,
) -> Tensor:
    """``A ** 2`` of causal attention, (num_queries, num_heads, value size) float64, of a kernel that rounds queries and
    weights too.

    ``query`` (num_queries, num_heads, head_size) are the last tokens of ``key`` and ``value`` (num_keys, num_kv_heads,
    size). Scales are (1, 1) or (num_kv_heads, 1). ``shared``: values are a part of their keys.
    """
    group = query.shape[1] // key.shape[1]
    errors = [
        torch.maximum(rounding.half_step * part.double().abs(), rounding.half_least_step * one.double())
        for part, one in ((key, k_scale), (value, v_scale))
    ]
    queries = query.double().transpose(0, 1)  # (heads, queries, size)
    keys, values, key_errors, value_errors = (
        part.double().repeat_interleave(group, dim=1).transpose(0, 1) for part in (key, value, *errors)
    )
    num_queries, num_keys = queries.shape[1], keys.shape[1]
    later = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
    weights = (scale * queries @ keys.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(dim=-1)
    outputs = weights @ values
    of_scores = weights**2 * scale**2 * (queries**2 @ (key_errors**2).transpose(1, 2))
    # sum_j of_scores_j * (v_j - o) ** 2, without a tensor of queries x keys x size
    through_keys = of_scores @ values**2 - 2 * outputs * (of_scores @ values)
    through_keys += outputs**2 * of_scores.sum(dim=-1, keepdim=True)
    squared = through_keys.clamp(min=0) + weights**2 @ value_errors**2
    return (2 * squared * (2 if shared else 1)).transpose(0, 1)


def why_beyond(error: Tensor, squared: Tensor, others: Tensor) -> str:
    """A sentence where errors are beyond the limits that ``squared_bounds`` gives; empty where they are within.

    ``others`` is what each number may be off for other reasons, of the same shape.
    """
    if not error.numel():
        return ""
    error = error.double().abs()
    deviations = math.sqrt(2 * math.log(2 * error.numel() / CHANCE))
    allowed = deviations * squared.sqrt() + others
    if not bool((error <= allowed).all()):  # NaN, too
        excess = (error - allowed).nan_to_num(nan=torch.inf)
        worst = int(excess.flatten().argmax())
        return f"a number is off by {error.flatten()[worst]:.3g} ({allowed.flatten()[worst]:.3g} allowed)"
    # Half of the bounds: where queries and weights are rounded too, two thirds of what is left.
    most = math.sqrt(float((squared / 2).mean())) + math.sqrt(float((others.double() ** 2).mean()))
    found = math.sqrt(float((error**2).mean()))
    return "" if found <= most else f"numbers are off by {found:.3g}, root mean square ({most:.3g} allowed)"
