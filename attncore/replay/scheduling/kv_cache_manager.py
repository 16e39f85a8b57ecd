"""The cache of a replay: a pool of blocks for each KV-cache group, from which requests get and lose blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attncore.replay.scheduling.block_pool import NULL_BLOCK, BlockPool
from attncore.replay.scheduling.running_request import RunningRequest, Tables
from attncore.replay.traces.trace import HASH_BLOCK
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from attncore.builder.persistent.kv_cache_group import KVCacheGroup
    from attncore.replay.traces.trace import Request


class CacheBlocks:
    """A pool of ``num_blocks`` blocks for each of ``groups``; a request holds blocks in all of them, or in none.

    ``finds_prefixes``: whether a block that others have computed is used again.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], num_blocks: int, *, finds_prefixes: bool = True) -> None:
        self.groups = tuple(groups)
        self.num_blocks, self.finds_prefixes = num_blocks, finds_prefixes
        self.pools = [BlockPool(num_blocks) for _ in self.groups]
        self._only = self.pools[0] if len(self.pools) == 1 else None
        self.sizes = [group.block_size for group in self.groups]
        self.windows = [group.sliding_window for group in self.groups]
        # Admission leaves these free: a pool filled to the last block preempts the newcomer in the next steps.
        self.watermark = num_blocks // 100
        self._unit = math.lcm(*self.sizes)  # a prefix that is reused ends where a block of every group ends

    def running(self, request: Request) -> RunningRequest:
        """The request before its first step: without blocks."""
        keys = {size: prefix_keys(request, size) if self.finds_prefixes else [] for size in self.sizes}
        return RunningRequest(request, [keys[size] for size in self.sizes])

    def admit(self, running: RunningRequest, *, alone: bool) -> bool:
        """Blocks for the request's goal, those of a known prefix included; False, and nothing done, if there are too
        few in a group. ``alone``: no request runs, so that no block has to stay free."""
        tokens, known = self._known_prefix(running)
        missing = [-(-running.goal // size) - len(blocks) for size, blocks in zip(self.sizes, known, strict=True)]
        spare = 0 if alone else self.watermark
        for pool, blocks, count in zip(self.pools, known, missing, strict=True):
            if count + spare > pool.num_free - pool.num_free_among(blocks):
                return False
        for group, (pool, blocks, count) in enumerate(zip(self.pools, known, missing, strict=True)):
            pool.hold([block for block in blocks if block != NULL_BLOCK])
            running.tables[group] = blocks + pool.allocate(count)
            running.published[group] = len(blocks)
        running.computed = tokens
        self._count_room(running)
        return True

    def grow(self, running: RunningRequest, tokens: int) -> Tables | None:
        """The blocks that the request gets so as to hold ``tokens``, which it does not; None, and nothing done, if
        there are too few."""
        if self._only is not None:  # nearly every replay: without the loops
            table, size = running.tables[0], self.sizes[0]
            count = -(-tokens // size) - len(table)
            if count > self._only.num_free:
                return None
            blocks = self._only.allocate(count)
            table += blocks
            running.room = size * len(table)
            return [blocks]
        counts = [-(-tokens // size) - len(table) for size, table in zip(self.sizes, running.tables, strict=True)]
        for pool, count in zip(self.pools, counts, strict=True):
            if count > pool.num_free:
                return None
        new = []
        for pool, table, count in zip(self.pools, running.tables, counts, strict=True):
            blocks = pool.allocate(count) if count > 0 else []
            table += blocks
            new.append(blocks)
        self._count_room(running)
        return new

    def release(self, running: RunningRequest) -> None:
        """The request gives up all its blocks; its tables stay for whoever looks at them."""
        for pool, table in zip(self.pools, running.tables, strict=True):
            pool.release([block for block in table if block != NULL_BLOCK])

    def pass_windows(self, running: RunningRequest) -> dict[str, list[int]]:
        """Gives up, by group name, the blocks wholly before what the request's next query sees."""
        passed = {}
        for group, pool, size, window, table in zip(
            self.groups, self.pools, self.sizes, self.windows, running.tables, strict=True
        ):
            if window is None:
                continue
            gone, index = [], min(_first_block(running.computed, size, window), len(table)) - 1
            while index >= 0 and table[index] != NULL_BLOCK:
                gone.append(table[index])
                table[index] = NULL_BLOCK
                index -= 1
            if gone:
                passed[group.name] = gone[::-1]
                pool.release(passed[group.name])
        return passed

    def publish(self, running: RunningRequest) -> bool:
        """Puts the prompt's full blocks that are now computed into the prefix caches; whether there were any."""
        some = False
        for group, (pool, size, keys) in enumerate(zip(self.pools, self.sizes, running.keys, strict=True)):
            full, table = min(running.computed // size, len(keys)), running.tables[group]
            for index in range(running.published[group], full):
                pool.publish(table[index], keys[index])
                some = True
            running.published[group] = max(running.published[group], full)
        return some

    def _known_prefix(self, running: RunningRequest) -> tuple[int, Tables]:
        """The longest beginning of the prompt that every group knows, in tokens, and its blocks.

        A full group must know all of its blocks, a windowed one those that the next query sees. At least one token of
        the goal is left to compute: its output is the answer.
        """
        most, full, tokens = running.goal - 1, {}, running.goal - 1
        for group, (pool, size, keys) in enumerate(zip(self.pools, self.sizes, running.keys, strict=True)):
            if self.windows[group] is None:
                full[group] = pool.lookup(keys[: most // size])
            tokens = min(tokens, size * len(full.get(group, keys)))
        for end in range(tokens - tokens % self._unit, 0, -self._unit):
            known = []
            for group, (pool, size, window) in enumerate(zip(self.pools, self.sizes, self.windows, strict=True)):
                if window is None:
                    known.append(full[group][: end // size])
                    continue
                first = _first_block(end, size, window)
                seen = pool.lookup(running.keys[group][first : end // size])
                if first + len(seen) < end // size:
                    break
                known.append([NULL_BLOCK] * first + seen)
            else:
                return end, known
        return 0, [[] for _ in self.groups]

    def _count_room(self, running: RunningRequest) -> None:
        running.room = min([size * len(table) for size, table in zip(self.sizes, running.tables, strict=True)])


def _first_block(computed: int, block_size: int, window: int) -> int:
    """The first block that a query after ``computed`` tokens sees."""
    return max(0, computed + 1 - window) // block_size


def prefix_keys(request: Request, block_size: int) -> list[Hashable]:
    """One key for each full block of the prompt; equal keys mean equal tokens at equal positions.

    A key is the block's index and the hash ids it touches; an id stands for all that precedes it too. Empty where the
    trace does not say what prompts share.
    """
    ids = request.hash_ids
    if ids is None:
        return []
    return [
        (index, *ids[index * block_size // HASH_BLOCK : ((index + 1) * block_size - 1) // HASH_BLOCK + 1])
        for index in range(request.prompt_tokens // block_size)
    ]


def check_pools(requests: Sequence[Request], num_blocks: int, groups: Sequence[KVCacheGroup]) -> None:
    """A ValueError that names the first request which could not run even alone, and how many blocks it needs."""
    smallest = min(groups, key=lambda group: group.block_size)
    block_size, where = smallest.block_size, f" of group {smallest.name!r}" if len(groups) > 1 else ""
    for request in requests:
        # The last token generated is never computed: nothing reads it.
        needed = -(-(request.prompt_tokens + request.output_tokens - 1) // block_size)
        if needed > num_blocks - 1:
            raise ValueError(
                f"num_blocks: row {request.row} of the trace has {request.prompt_tokens} + "
                f"{counted(request.output_tokens, 'token')} and needs {counted(needed, 'block')} of "
                f"{block_size}{where}; --num-blocks "
                f"{num_blocks} has {num_blocks - 1} to hand out, pass at least {needed + 1}"
            )
