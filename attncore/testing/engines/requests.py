"""The requests of a small engine, the blocks that they hold, and the keys and values of their computed tokens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attncore.builder import InputBatch
from attncore.show import counted
from attncore.testing.harness.errors import ConformanceError, UnsupportedError

MAX_REQUESTS = 264
MAX_BLOCKS = 4096  # of a request, where a cache has more


class History(NamedTuple):
    """The keys and values of a request's computed tokens, float32 (tokens, num_kv_heads, size) on the host."""

    keys: Tensor
    values: Tensor

    def first(self, tokens: int) -> History:
        """The first ``tokens`` of them."""
        return History(self.keys[:tokens].clone(), self.values[:tokens].clone())

    def extended(self, keys: Tensor, values: Tensor) -> History:
        """These and the keys and values of further tokens."""
        return History(torch.cat((self.keys, keys)), torch.cat((self.values, values)))


def require_blocks(most: int | None, num_blocks: int) -> None:
    """UnsupportedError where a cache has more blocks than ``most``, a spec's largest block id, allows."""
    if most is not None and num_blocks - 1 > most:
        raise UnsupportedError(f"its spec says max_block_id={most}, and this takes {counted(num_blocks, 'block')}")


class Requests:
    """An InputBatch, a pool of blocks in random order, and what was computed.

    ``history`` has, by request, its keys and values; ``holders``, by block, the number of requests that hold it;
    ``written``, bool (num_blocks, block_size), the slots that hold a token.
    """

    with_spans = False
    """Whether requests may have spans."""
    declared_length: int | None = None
    """The longest sequence that the backend's spec allows."""

    def __init__(self, num_blocks: int, block_size: int, random: np.random.Generator, no_tokens: History) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = [int(block) for block in random.permutation(np.arange(1, num_blocks))]
        self.batch = InputBatch(
            max_num_reqs=MAX_REQUESTS, max_model_len=min(num_blocks, MAX_BLOCKS) * block_size, block_size=block_size,
            num_blocks=num_blocks, spans=self.with_spans,
        )  # fmt: skip
        self.history: dict[Hashable, History] = {}
        self.holders: dict[int, int] = {}
        self.written = np.zeros((num_blocks, block_size), dtype=np.bool_)
        self._no_tokens = no_tokens

    def add(self, name: Hashable, tokens: int, *, prefix_of: Hashable = None, prefix_blocks: int = 0) -> None:
        """Add a request with blocks for ``tokens`` tokens, the first ``prefix_blocks`` those of another request."""
        self._require_length(tokens)
        shared = self.batch.block_ids(prefix_of)[:prefix_blocks] if prefix_blocks else []
        own = self.take_blocks(-(-tokens // self.block_size) - len(shared))
        for block in shared:
            self.holders[block] += 1
        computed = len(shared) * self.block_size
        self.batch.add_request(name, [*shared, *own], computed)
        self.history[name] = self.history[prefix_of].first(computed) if computed else self._no_tokens

    def remove(self, name: Hashable) -> None:
        """Remove a request; blocks that no other request holds go back to the pool."""
        for block in self.batch.remove_request(name):
            if block:  # 0 is the null block
                self._let_go(block)
        del self.history[name]

    def _let_go(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            self.give_back(block)

    def grow(self, name: Hashable, tokens: int = 1) -> None:
        """Give a request the blocks that its next ``tokens`` lack."""
        self._require_length(self.context(name) + tokens)
        held = len(self.batch.block_ids(name))
        missing = -(-(self.context(name) + tokens) // self.block_size) - held
        if missing > 0:
            self.batch.append_blocks(name, self.take_blocks(missing))

    def release_passed(self, name: Hashable, window: int) -> None:
        """Make null the request's blocks that a window of ``window`` tokens has passed: no later query sees them.
        Those that no other request holds go back to the pool.
        """
        blocks = self.batch.block_ids(name)
        for index in range(max(0, self.context(name) - window + 1) // self.block_size):
            if block := blocks[index]:
                self.batch.replace_block(name, index, 0)
                self._let_go(block)

    def replace_block(self, name: Hashable, index: int, block: int) -> None:
        """Put ``block``, a copy, in the place of the request's block number ``index``, which goes back to the pool."""
        tokens, blocks = self.batch.num_computed_tokens(name), self.batch.remove_request(name)
        old, blocks[index] = blocks[index], block
        self.holders[block] = self.holders.pop(old)
        self.written[block] = self.written[old]
        self.give_back(old)
        self.batch.add_request(name, blocks, tokens)

    def _require_length(self, tokens: int) -> None:
        """UnsupportedError where a request of so many tokens is longer than the spec allows."""
        if self.declared_length is not None and tokens > self.declared_length:
            raise UnsupportedError(
                f"its spec says max_model_len={self.declared_length}, and this test has a request of "
                f"{counted(tokens, 'token')}"
            )

    def context(self, name: Hashable) -> int:
        """The number of a request's computed tokens."""
        return len(self.history[name].keys)

    def scheduled(self, tokens: dict[Hashable, int]) -> dict[Hashable, int]:
        """What ``build`` takes: ``tokens`` by request, and 0 for all others."""
        return {**dict.fromkeys(self.batch.req_ids, 0), **tokens}

    def take_blocks(self, count: int) -> list[int]:
        """Blocks from the pool, held once each."""
        if count > len(self.free):
            raise ConformanceError(
                f"the kit asks for {counted(count, 'block')} of its pool, which has {len(self.free)} left: report this "
                "to the authors of attncore"
            )
        taken = [self.free.pop() for _ in range(count)]
        self.holders.update(dict.fromkeys(taken, 1))
        return taken

    def give_back(self, block: int) -> None:
        """Put a block that no request holds back into the pool; it holds no token any more."""
        self.written[block] = False
        self.free.insert(0, block)
