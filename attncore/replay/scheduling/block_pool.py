"""Blocks of the paged cache: who holds each, which prompts are cached in them, which one is reused next."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

NULL_BLOCK = 0  # never handed out: a row of zeros in a block table must point at no request's tokens


class BlockPool:
    """Blocks 1 .. ``num_blocks`` - 1, counted references, and a prefix cache over full prompt blocks.

    A block is *held* (by one or more requests) or *free*. A free block that has a key keeps its tokens until it is
    needed for something else; the one released longest ago goes first. Memory is proportional to the blocks ever handed
    out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks: {num_blocks} leaves no block to hand out, block {NULL_BLOCK} being the null block"
            )
        self.num_blocks = num_blocks
        self._never_used = 1  # this block and all above it
        self._blank: list[int] = []  # free, without a key; the last one goes next
        self._cached: OrderedDict[int, Hashable] = OrderedDict()  # free, with its key; the first one goes next
        self._holders: dict[int, int] = {}  # held block -> number of holders
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those that still know a prompt included."""
        return self.num_blocks - self._never_used + len(self._blank) + len(self._cached)

    def lookup(self, keys: Sequence[Hashable]) -> list[int]:
        """The blocks of the longest prefix of ``keys`` that is cached; this holds none of them."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these cached blocks are free: holding them takes them from ``num_free``."""
        return sum(block in self._cached for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these cached blocks."""
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one holder and no key; forgets the prompts longest unused where it must."""
        if count > self.num_free:
            raise ValueError(
                f"count: {counted(count, 'block')} asked, {self.num_free} of {self.num_blocks - 1} are free"
            )
        return [self._allocate() for _ in range(count)]

    def _allocate(self) -> int:
        if self._blank:
            block = self._blank.pop()
        elif self._never_used < self.num_blocks:
            block = self._never_used
            self._never_used += 1
        else:
            block, key = self._cached.popitem(last=False)
            del self._block_of[key], self._key_of[block]
        self._holders[block] = 1
        return block

    def publish(self, block: int, key: Hashable) -> None:
        """Lets others find this held block under ``key``, now that all its tokens are in the cache.

        Where the key is known already (two requests computed the same prompt side by side) the first block stays.
        """
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each. The last block is given up first: a prefix is worth more than what follows it."""
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
                continue
            del self._holders[block]
            if block in self._key_of:
                self._cached[block] = self._key_of[block]
            else:
                self._blank.append(block)
