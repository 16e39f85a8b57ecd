"""Attention in torch, and how kernels read what they are given: shared by the stand-ins of all generations."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")
TILE = 128
"""Keys that a kernel loads at a time."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, causal: bool,
    window: tuple[int | None, int | None], softcap: float, slopes: Tensor | None = None, sinks: Tensor | None = None,
    from_start: bool = False, tile: int = 0, unmasked: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: query (q, heads, size), key and value (k, kv heads, size); output and log-sum-exp (q, heads).

    The mask is aligned to the last query and key. ``from_start``: slopes count from the first key, as causal ones do.
    Tiles of so many keys that lie before every query's window are not read; without ``tile`` they are multiplied by 0.
    ``unmasked``, bool (q, k): keys that a query sees in spite of the mask.
    """
    scale = query.shape[2] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.float().repeat_interleave(groups, dim=1) for part in (key, value))
    score = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    where = torch.arange(len(query))[:, None] + len(key) - len(query)
    distance = where - torch.arange(len(key))[None, :]
    if slopes is not None:
        bias = torch.arange(len(key))[None, :].expand_as(distance) if from_start else -distance.abs()
        score = score + slopes[:, None, None] * bias
    left, right = (None if side is None or side < 0 else side for side in window)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        right = 0
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= -distance > right
    if unmasked is not None:
        hidden &= ~unmasked
    if tile:
        before = int(hidden.all(dim=0).cumprod(0).sum())
        values[: before // tile * tile] = 0.0
    score = score.masked_fill(hidden, -torch.inf)
    lse = score.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None].expand_as(lse))
    weights = torch.exp(score - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype), lse.transpose(0, 1)


def check_starts(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise RuntimeError("lengths and starts must be contiguous int32")


def loaded_tile(first: int, last: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Packed rows first:last as kernels of generations 3 and 4 load them, up to the end of a tile."""
    return tuple(part[first : max(last, first + -(-(last - first) // TILE) * TILE)] for part in tensors)


def read_pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    if not length:
        return cache.new_empty((0, *cache.shape[2:]))
    return torch.cat([cache[block] for block in table[: -(-length // cache.shape[1])].tolist()])


def check_table(table: Tensor | None) -> None:
    if table is not None and table.stride(-1) != 1:
        raise RuntimeError(f"block_table must have contiguous last dimension, not {table.shape} {table.stride()}")
