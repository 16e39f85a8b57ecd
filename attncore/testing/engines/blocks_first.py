"""The tensors of a cache with the axis that counts blocks first, and their elements as integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def block_views(backend: AttentionBackend, kv_cache: Any, num_blocks: int) -> list[Tensor]:
    """The cache's tensors as views whose first axis counts the ``num_blocks`` blocks; ConformanceError where one
    has no such axis.
    """
    if isinstance(kv_cache, Tensor):
        return [_blocks_first(kv_cache, backend.kv_cache_block_axis(), num_blocks)]
    return [_blocks_first(tensor, 0, num_blocks) for tensor in kv_cache]


def tensors_of(kv_cache: Any) -> tuple[Tensor, ...]:
    """The tensors of a cache as it is: one, or those of a tuple."""
    return (kv_cache,) if isinstance(kv_cache, Tensor) else tuple(kv_cache)


_WRONG = "allocate_kv_cache({blocks}) gave a tensor of shape {shape}: an axis must count the {blocks} blocks"


def _blocks_first(tensor: Tensor, axis: int, num_blocks: int) -> Tensor:
    if tensor.shape[axis] != num_blocks:
        raise ConformanceError(_WRONG.format(shape=tuple(tensor.shape), blocks=num_blocks))
    return tensor.movedim(axis, 0)


def as_integers(tensor: Tensor) -> Tensor:
    """A tensor's memory as integers of its element size."""
    return tensor.view(_INTEGERS[tensor.element_size()])
