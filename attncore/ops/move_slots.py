"""Moving tokens within a paged cache, from slot to slot: what is kept of a draft tree is moved together by it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attncore.array_arguments import block_pairs
from attncore.ops.written_tensor import check_written


def move_slots(key_cache: Tensor, value_cache: Tensor, moves: Any) -> None:
    """Moves tokens of one layer's cache: ``moves`` is (n, 2), the slots from which and to which, on the host or device.

    The caches are views (blocks, block_size, num_kv_heads, head_size or head_size_v) of any strides and dtype. All
    tokens are read before any is written, so that a slot may be left and filled in one call. Nothing waits for a
    device. Raises ValueError naming the argument, before anything is written, for a cache that cannot be written to,
    and for ``moves`` that are no pairs of integers, and (on the host) lie outside the cache or name a slot to move to
    twice.
    """
    move_slots_of_layers([(key_cache, value_cache)], moves)


def move_slots_of_layers(layers: list[tuple[Tensor, Tensor]], moves: Any) -> None:
    """``move_slots`` of the caches of several layers, all checked before any is written to."""
    for key_cache, value_cache in layers:
        check_written("key_cache", key_cache)
        check_written("value_cache", value_cache)
    if not layers:
        return
    if isinstance(moves, Tensor) and not moves.is_cpu:
        if moves.dim() != 2 or moves.shape[1] != 2 or moves.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"moves: {moves.dtype} {tuple(moves.shape)} found; give integers of shape (n, 2)")
        pairs = moves.to(torch.int64)
    else:
        num_slots = min(cache.shape[0] * cache.shape[1] for pair in layers for cache in pair)
        pairs = torch.from_numpy(block_pairs("moves", moves, num_slots, num_slots, one="slot"))
    if not len(pairs):
        return
    with torch.no_grad():  # a cache has no gradient
        for pair in layers:
            pairs = pairs.to(pair[0].device, non_blocking=True)
            # Values may be a part of the keys: both are read before either is written. torch indexes no fp8.
            caches = [cache.view(torch.uint8) if cache.element_size() == 1 else cache for cache in pair]
            left, filled = ((torch.div(slots, pair[0].shape[1], rounding_mode="floor"), slots % pair[0].shape[1])
                            for slots in pairs.unbind(1))  # fmt: skip
            tokens = [cache[left] for cache in caches]
            for cache, new in zip(caches, tokens, strict=True):
                cache[filled] = new
