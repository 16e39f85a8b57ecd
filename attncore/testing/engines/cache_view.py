"""A backend's cache seen as blocks and tokens, whatever its layout: which elements a slot owns is found by writing.

That is how the kit can poison what nobody owns, and tell what a step changed, without knowing how a library lays out
its blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncore.testing.engines.planned_steps import prefill_once
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

BoolArray = npt.NDArray[np.bool_]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pages:
    """One layer's cache of ``num_blocks`` blocks and a sink.

    ``parts`` are its tensors with the axis that counts blocks first; ``owner`` holds, for each element of a block of a
    part, the offset of the token that it belongs to (-1: to none).
    """

    def __init__(self, backend: AttentionBackend, kv_cache: Any, num_blocks: int) -> None:
        self.parts = block_views(backend, kv_cache, num_blocks)
        self.num_blocks, self.block_size = num_blocks, backend.config.block_size
        self.owner = footprint(backend)

    def fill(self, where: BoolArray, number: float) -> None:
        """Set the elements of the tokens ``where``, bool (num_blocks + 1, block_size), to ``number``."""
        chosen = torch.from_numpy(where)
        for part, owner in zip(self.parts, self.owner, strict=True):
            mask = (chosen[:, owner.clamp(min=0)] & (owner >= 0)).to(part.device)
            _bits(part).masked_fill_(mask, int(_bits(_number(number, part.dtype)).item()))

    def snapshot(self) -> list[Tensor]:
        """A copy of all elements as integers, so that NaN equals itself."""
        return [_bits(part).clone() for part in self.parts]

    def restore(self, before: list[Tensor]) -> None:
        """All elements as they were at a snapshot."""
        for part, old in zip(self.parts, before, strict=True):
            _bits(part).copy_(old)

    def changed(self, before: list[Tensor]) -> tuple[BoolArray, bool]:
        """The tokens of which an element changed, bool (num_blocks + 1, block_size); whether an element of no token
        did, outside the sink."""
        found = np.zeros((self.num_blocks + 1, self.block_size), dtype=np.bool_)
        stray = False
        for part, owner, old in zip(self.parts, self.owner, before, strict=True):
            differs = (_bits(part) != old).cpu()
            blocks, *rest = differs.nonzero(as_tuple=True)
            offsets = owner[tuple(rest)]
            stray |= bool(((offsets < 0) & (blocks < self.num_blocks)).any())
            found[blocks[offsets >= 0].numpy(), offsets[offsets >= 0].numpy()] = True
        return found, stray


def block_views(backend: AttentionBackend, kv_cache: Any, num_blocks: int) -> list[Tensor]:
    """The cache's tensors as views whose first axis counts the ``num_blocks + 1`` blocks; ConformanceError where one
    has no such axis.
    """
    if isinstance(kv_cache, Tensor):
        return [_blocks_first(kv_cache, backend.kv_cache_block_axis(), num_blocks)]
    parts = []
    for tensor in kv_cache:
        axes = [axis for axis, size in enumerate(tensor.shape) if size == num_blocks + 1]
        if not axes:
            raise ConformanceError(_WRONG.format(shape=tuple(tensor.shape), blocks=num_blocks, more=num_blocks + 1))
        parts.append(_blocks_first(tensor, axes[0], num_blocks))
    return parts


_WRONG = (
    "allocate_kv_cache({blocks}) gave a tensor of shape {shape}: an axis must count the {blocks} blocks and the sink, "
    "{more} in all"
)


def _blocks_first(tensor: Tensor, axis: int, num_blocks: int) -> Tensor:
    if tensor.shape[axis] != num_blocks + 1:
        raise ConformanceError(_WRONG.format(shape=tuple(tensor.shape), blocks=num_blocks, more=num_blocks + 1))
    return tensor.movedim(axis, 0)


def footprint(backend: AttentionBackend) -> list[Tensor]:
    """For each part, int64 of a block's shape: the offset of the token that owns an element, -1 where none does.

    Found by writing a whole block of ones, then once for each bit of the offset with twos where the bit is set: both
    numbers are exact in every dtype of a cache.
    """
    known: list[Tensor] | None = backend.__dict__.get("_attncore_testing_footprint")
    if known is not None:
        return known
    size = backend.config.block_size
    offsets = torch.arange(size)
    base = _written(backend, torch.ones(size))
    owner = [torch.where(part != 0, 0, -1) for part in base]
    for bit in range((size - 1).bit_length()):
        image = _written(backend, 1.0 + (offsets >> bit & 1))
        for found, part, ones in zip(owner, image, base, strict=True):
            found[(part != ones) & (found >= 0)] += 1 << bit
    for found in owner:
        counts = torch.bincount(found[found >= 0].flatten(), minlength=size)
        if len(counts) != size or len(set(counts.tolist())) != 1:
            raise ConformanceError(
                f"a prompt of exactly one block left {counts.tolist()} elements for the tokens of its block; every "
                "token must own as many: are slots written as block * block_size + offset?"
            )
    if not any((found >= 0).any() for found in owner):
        raise ConformanceError("a prompt of exactly one block wrote nothing to its block: forward must write the cache")
    backend.__dict__["_attncore_testing_footprint"] = owner
    return owner


def _written(backend: AttentionBackend, numbers: Tensor) -> list[Tensor]:
    """The bits of block 1, for each part, after a prompt whose token i has keys and values of ``numbers[i]``."""
    num_blocks = 2
    kv_cache = backend.allocate_kv_cache(num_blocks)
    before = [_bits(part).clone() for part in block_views(backend, kv_cache, num_blocks)]
    prefill_once(backend, kv_cache, [1], numbers)
    after = [_bits(part) for part in block_views(backend, kv_cache, num_blocks)]
    for old, new in zip(before, after, strict=True):
        if not torch.equal(old[0], new[0]):
            raise ConformanceError("a prompt whose only block is 1 changed block 0, which it does not own")
    return [part[1].cpu() for part in after]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _number(number: float, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.tensor(number).to(dtype)
    # A library may keep fp8 as bytes: the code of NaN is the same in both formats, any other byte is finite.
    return torch.tensor(0x7F if number != number else 0x47).to(dtype)
