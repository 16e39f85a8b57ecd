"""Dense attention of one sequence in float32, one head after another: what paged attention is checked against.

Nothing here knows of blocks, slots or batches, and nothing is shared with the ``reference`` backend, so that the two
can disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from attncore.arguments import flag, float32_number, integer, items, optional_integer
from attncore.array_arguments import not_strided
from attncore.ops.without_autocast import without_autocast
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_SCORES = 1 << 30  # of a head, 4 GiB: expanded tensors, which take no memory, may ask for far more


@overload
def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = ...,
    sliding_window: int | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: Tensor | Sequence[float] | None = ...,
    sinks: Tensor | Sequence[float] | None = ...,
    spans: Sequence[tuple[int, int]] = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = ...,
    sliding_window: int | None = ...,
    logits_soft_cap: float | None = ...,
    alibi_slopes: Tensor | Sequence[float] | None = ...,
    sinks: Tensor | Sequence[float] | None = ...,
    spans: Sequence[tuple[int, int]] = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | Sequence[float] | None = None,
    sinks: Tensor | Sequence[float] | None = None,
    spans: Sequence[tuple[int, int]] = (),
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last ``num_queries`` tokens of a sequence over all of its ``num_keys`` tokens, in float32.

    ``query`` is ``(num_queries, num_heads, head_size)``, ``key`` ``(num_keys, num_kv_heads, head_size)``, ``value``
    ``(num_keys, num_kv_heads, value_size)``, any float dtype, one device. Query i is token ``num_keys - num_queries +
    i``; query head h reads key-value head ``h // (num_heads // num_kv_heads)``.

    A score is ``scale * q.k``, then ``cap * tanh(score / cap)`` with a soft cap, then minus ``slope * distance`` with
    ALiBi, the distance being that of the two positions. ``causal`` hides later tokens; ``sliding_window`` hides those
    that many positions away or more: causal, it is the number of tokens that a query may see, itself included.
    ``sinks`` is a logit a head that takes part in the softmax's sum and carries no value. Slopes and sinks have
    ``num_heads`` entries. ``spans``, pairs (start, stop) of positions, are ranges whose tokens see each other, whatever
    ``causal`` and the window hide. Not causal, without window and slopes, positions do not matter: there may be fewer
    keys than queries, and none.

    Returns ``(num_queries, num_heads, value_size)`` float32, and with ``return_lse`` also the natural logarithm of the
    softmax's sum (the sink included), ``(num_queries, num_heads)`` float32. Without any key they are 0 and -inf.
    """
    scale = float32_number("scale", scale)
    sliding_window = optional_integer("sliding_window", sliding_window, 1)  # a query sees at least itself
    if logits_soft_cap is not None:
        logits_soft_cap = float32_number("logits_soft_cap", logits_soft_cap, positive=True)
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    spans = _checked_spans(spans)
    placed = causal or sliding_window is not None or alibi_slopes is not None or bool(spans)
    _check(query, key, value, placed)
    num_queries, num_heads = query.shape[:2]
    num_keys, num_kv_heads = key.shape[:2]
    slopes = _per_head("alibi_slopes", alibi_slopes, num_heads)
    sink_logits = _per_head("sinks", sinks, num_heads)

    key_position = torch.arange(num_keys, dtype=torch.int64, device=query.device)
    query_position = torch.arange(num_keys - num_queries, num_keys, dtype=torch.int64, device=query.device).unsqueeze(1)
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=query.device)
    if causal:
        hidden |= key_position > query_position
    if sliding_window is not None:
        hidden |= (key_position - query_position).abs() >= sliding_window
    for start, stop in spans:
        inside = (query_position >= start) & (query_position < stop)
        hidden &= ~(inside & (key_position >= start) & (key_position < stop))

    outputs, sums = [], []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        score = _product(query[:, head], key[:, kv_head].T) * scale
        if logits_soft_cap is not None:
            score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
        if slopes is not None:
            score = score - slopes[head] * (key_position - query_position).abs().float()
        score = score.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(score, dim=1)
        if sink_logits is not None:
            lse = torch.logaddexp(lse, torch.full_like(lse, sink_logits[head]))
        outputs.append(_product(torch.exp(score - lse.unsqueeze(1)), value[:, kv_head]))
        sums.append(lse)
    output = torch.stack(outputs, dim=1)
    return (output, torch.stack(sums, dim=1)) if return_lse else output


def _product(one: Tensor, other: Tensor) -> Tensor:
    with without_autocast(one.device):
        return one.float() @ other.float()


def _check(query: Tensor, key: Tensor, value: Tensor, placed: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: {type(tensor).__name__} found; give a tensor of floats (tokens, heads, head_size)"
            )
        if (why := not_strided(tensor)) is not None:
            raise ValueError(f"{name}: {why}")
        if tensor.dim() != 3 or not tensor.is_floating_point():
            raise ValueError(
                f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)} found; give floats (tokens, heads, head_size)"
            )
        if tensor.device != query.device:
            raise ValueError(f"{name}: on {tensor.device}, but the query is on {query.device}")
    if query.shape[1] < 1:
        raise ValueError(f"query: shape {tuple(query.shape)} found, without a head; give one head or more")
    if key.shape[2] != query.shape[2] or key.shape[1] < 1 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"key: heads and head size {tuple(key.shape[1:])} found; the query has {tuple(query.shape[1:])}, "
            "whose heads must be a multiple of the key's, and whose head size the same"
        )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(f"value: tokens and heads {tuple(value.shape[:2])} found; the key has {tuple(key.shape[:2])}")
    if placed and query.shape[0] > key.shape[0]:
        raise ValueError(
            f"query: {counted(query.shape[0], 'token')} found; the whole sequence has {counted(key.shape[0], 'key')}"
        )
    if query.shape[0] * key.shape[0] > _MOST_SCORES:
        raise ValueError(
            f"query: {counted(query.shape[0], 'token')} over {counted(key.shape[0], 'key')}; dense attention makes at "
            f"most {_MOST_SCORES} scores a head; give fewer tokens at a time"
        )


def _checked_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    checked = []
    for index, span in enumerate(items("spans", spans)):
        bounds = items(f"spans[{index}]", span)
        if len(bounds) != 2:
            raise ValueError(f"spans[{index}]: {counted(len(bounds), 'number')} found; give pairs (start, stop)")
        start, stop = (integer(f"spans[{index}]", bound, 0) for bound in bounds)
        checked.append((start, stop))
    return checked


def _per_head(name: str, values: Tensor | Sequence[float] | None, num_heads: int) -> list[float] | None:
    if values is None:
        return None
    nothing = (-torch.inf,) if name == "sinks" else ()  # a sink that takes no part in the sum
    numbers = [
        -torch.inf if type(value) is float and value in nothing else float32_number(f"{name}[{head}]", value)
        for head, value in enumerate(_listed(name, values))
    ]
    if len(numbers) != num_heads:
        raise ValueError(
            f"{name}: {counted(len(numbers), 'value')} found; give one for each query head, {num_heads} in all"
        )
    return numbers


def _listed(name: str, values: Tensor | Sequence[float]) -> list[object]:
    return items(name, values.tolist() if isinstance(values, Tensor) and values.dim() == 1 else values)
