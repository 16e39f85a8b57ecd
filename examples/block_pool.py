"""The blocks of a paged KV cache: who holds them, and which tokens are in those that nobody holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


class BlockPool:
    """Blocks 1 to ``num_blocks - 1`` with counted holders; a free block keeps its tokens until it is taken."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))  # block 0 is the null block
        self._known: OrderedDict[int, Any] = OrderedDict()  # free blocks with their keys, the longest free first
        self._holders: dict[int, int] = {}
        self._block_of: dict[Any, int] = {}
        self._key_of: dict[int, Any] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._known)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks, or None where there are not so many."""
        if count > self.num_free:
            return None
        blocks = [self._blank.pop() if self._blank else self._evicted() for _ in range(count)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, key: Any) -> int | None:
        """The block that holds the tokens of ``key``, held once more; None where no block does."""
        if (block := self._block_of.get(key)) is not None:
            self._known.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        return block

    def publish(self, block: int, key: Any) -> None:
        """The block's tokens are all computed, and others may use them."""
        if block not in self._key_of and key not in self._block_of:
            self._key_of[block], self._block_of[key] = key, block

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # the end of a prompt is given up first: its beginning is shared more often
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._key_of:
                    self._known[block] = self._key_of[block]
                else:
                    self._blank.append(block)

    def _evicted(self) -> int:
        block, key = self._known.popitem(last=False)
        del self._block_of[key], self._key_of[block]
        return block


if __name__ == "__main__":
    raise SystemExit("block_pool.py is a module; run generate.py beside it")
