"""A backend's cache seen as blocks and tokens, whatever its layout.

With the owners of a block's elements (slot_owners.py) the kit can fill the slots that no request owns, and tell which
slots a step changed, without knowing how a library lays out its blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncore.testing.engines.blocks_first import as_integers, block_views
from attncore.testing.engines.cache_element_owners import slot_owners

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

BoolArray = npt.NDArray[np.bool_]


class CacheView:
    """One layer's cache of ``num_blocks`` blocks.

    ``parts`` are its tensors with the axis that counts blocks first; ``owners`` holds, for each element of a block of a
    part, the offset of the token that it belongs to (-1: to none); they are found where they are not given.
    """

    def __init__(
        self, backend: AttentionBackend, kv_cache: Any, num_blocks: int, owners: list[Tensor] | None = None
    ) -> None:
        self.parts = block_views(backend, kv_cache, num_blocks)
        self.num_blocks, self.block_size = num_blocks, backend.config.block_size
        self.owners = slot_owners(backend) if owners is None else owners

    @property
    def elements_of_a_token(self) -> int:
        """How many elements of its block a token owns."""
        return sum(int((owner == 0).sum()) for owner in self.owners)

    def fill(self, where: BoolArray, number: float) -> None:
        """Set the elements of the slots ``where``, bool (num_blocks, block_size), to ``number``."""
        chosen = torch.from_numpy(where)
        for part, owner in zip(self.parts, self.owners, strict=True):
            mask = (chosen[:, owner.clamp(min=0)] & (owner >= 0)).to(part.device)
            as_integers(part).masked_fill_(mask, int(as_integers(_number(number, part.dtype)).item()))

    def snapshot(self) -> list[Tensor]:
        """A copy of all elements as integers, so that NaN equals itself."""
        return [as_integers(part).clone() for part in self.parts]

    def restore(self, before: list[Tensor]) -> None:
        """Set all elements to those of a snapshot."""
        for part, old in zip(self.parts, before, strict=True):
            as_integers(part).copy_(old)

    def changed(self, before: list[Tensor]) -> tuple[BoolArray, bool]:
        """The slots of which an element changed, bool (num_blocks, block_size); whether an element of no slot
        did."""
        changed = np.zeros((self.num_blocks, self.block_size), dtype=np.bool_)
        stray = False
        for part, owner, old in zip(self.parts, self.owners, before, strict=True):
            blocks, *rest = (as_integers(part) != old).cpu().nonzero(as_tuple=True)
            offsets = owner[tuple(rest)]
            stray |= bool((offsets < 0).any())
            changed[blocks[offsets >= 0].numpy(), offsets[offsets >= 0].numpy()] = True
        return changed, stray


def _number(number: float, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.tensor(number).to(dtype)
    # A library may keep fp8 as bytes: the code of NaN is the same in both formats, any other byte is finite.
    return torch.tensor(0x7F if number != number else 0x47).to(dtype)
