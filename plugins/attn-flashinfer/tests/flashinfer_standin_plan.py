"""Plans under CUDA graphs in plain Python, as FlashInfer 0.7's are: what the stand-in writes, and the kernel must.

Facts of the library, written down anew: no line is its own. ``describe`` is what a wrapper keeps of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

PROCESSORS = 11
"""Multiprocessors of the device that the stand-in stands on."""


@dataclass
class PlanFacts:
    """One captured size of one wrapper. ``blocks_each``: of CUDA cores, how many blocks a multiprocessor holds."""

    num_reqs: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    window_left: int = -1
    head_size: int = 64
    tensor_cores: bool = True
    blocks_each: int = 4
    processors: int = PROCESSORS


class Memory:
    """Places in a workspace, one behind the other, each aligned."""

    def __init__(self) -> None:
        self.used = 0
        self.arrays: list[tuple[int, npt.NDArray[Any]]] = []

    def take(self, nbytes: int, align: int = 16) -> int:
        begin = -(-self.used // align) * align
        self.used = begin + nbytes
        return begin

    def put(self, place: int, values: Any, dtype: Any = np.int32) -> None:
        self.arrays.append((place, np.asarray(values, dtype)))

    def write(self, workspace: npt.NDArray[np.uint8]) -> None:
        for place, values in self.arrays:
            raw = values.view(np.uint8)
            workspace[place : place + len(raw)] = raw


def tile_of_queries(packed: int, head_size: int) -> int:
    if packed > 64 and head_size < 256:
        return 128
    return 64 if packed > 16 else 16


def write_plan(indptr: list[int], facts: PlanFacts, workspace: npt.NDArray[np.uint8]) -> list[int]:
    """Writes the plan of rows whose pages begin at ``indptr``; its description, as a list of numbers."""
    pages = [after - before for before, after in pairwise(indptr)]
    memory = Memory()
    made = (_prefill_plan if facts.tensor_cores else _decode_plan)(pages, facts, memory)
    memory.write(workspace)
    return made


def _prefill_plan(pages: list[int], facts: PlanFacts, memory: Memory) -> list[int]:
    group = facts.num_heads // facts.num_kv_heads
    # Of one token each, the tile is of a row that had all tokens but one of each other row: here, one.
    packed = facts.query_len * group
    tile = tile_of_queries(packed, facts.head_size)
    tiles = -(-packed // tile)
    limit = 2 * facts.processors // facts.num_kv_heads
    # Rows of one token are planned as ragged ones, whose tiles are bounded from their sum.
    bound = -(-facts.num_reqs * group // tile) + facts.num_reqs - 1
    padded = max(limit, facts.num_reqs * tiles if facts.query_len > 1 else bound)
    if facts.window_left >= 0:
        seen = -(-(facts.window_left + tile) // facts.page_size)
        pages = [min(count, seen) for count in pages]
    keys = [max(count, 1) for count in pages]
    low, high = max(128 // facts.page_size, 1), max(keys)
    while low < high:
        middle = (low + high) // 2
        if sum(tiles * -(-count // middle) for count in keys) > limit:
            low = middle + 1
        else:
            high = middle
    requests, qo_tiles, kv_tiles, merge, o = [], [], [], [0], [0]
    for row, count in enumerate(keys):
        chunks = -(-count // low)
        for qo_tile in range(tiles):
            for kv_tile in range(chunks):
                requests.append(row)
                qo_tiles.append(qo_tile)
                kv_tiles.append(kv_tile)
        for _ in range(facts.query_len):
            merge.append(merge[-1] + chunks)
        o.append(o[-1] + facts.query_len * chunks)
    assert len(requests) <= padded
    total = facts.num_reqs * facts.query_len
    places = [memory.take(4 * padded) for _ in range(3)]
    at_o, at_chunk, at_rows = memory.take(4 * (facts.num_reqs + 1)), memory.take(4, 1), memory.take(4)
    at_merge, at_mask = memory.take(4 * (total + 1)), memory.take(padded)
    for place, values in zip(places, (requests, qo_tiles, kv_tiles), strict=True):
        memory.put(place, values)
    memory.put(at_o, o)
    memory.put(at_chunk, [low * facts.page_size])
    memory.put(at_rows, [total])
    memory.put(at_merge, merge)
    memory.put(at_mask, np.arange(padded) < len(requests), np.uint8)
    return [padded, total, at_rows, tile, *places, at_merge, at_o, at_chunk, 0, 4096, at_mask, 1, 1]


def _decode_plan(pages: list[int], facts: PlanFacts, memory: Memory) -> list[int]:
    grid = facts.blocks_each * facts.processors
    splits = facts.num_reqs * facts.num_kv_heads < grid
    if splits:
        low, high = max(128 // facts.page_size, 1), max(pages)
        while low < high:
            middle = (low + high) // 2
            if sum(-(-count // middle) for count in pages) * facts.num_kv_heads > grid:
                low = middle + 1
            else:
                high = middle
        padded = grid // facts.num_kv_heads
    else:
        low, padded = max(1, *pages), facts.num_reqs
    requests, kv_tiles, o = [], [], [0]
    for row, count in enumerate(pages):
        chunks = -(-max(count, 1) // low)
        requests += [row] * chunks
        kv_tiles += range(chunks)
        o.append(o[-1] + chunks)
    at_request, at_kv = memory.take(4 * padded), memory.take(4 * padded)
    at_o, at_chunk = memory.take(4 * (padded + 1)), memory.take(4, 1)
    at_mask = memory.take(padded) if splits else 0
    # Rows without pages are not counted by the search: there may be more entries than room. Later arrays are whole.
    memory.put(at_request, requests)
    memory.put(at_kv, kv_tiles)
    memory.put(at_o, o)
    memory.put(at_chunk, [low * facts.page_size])
    if splits:
        memory.put(at_mask, np.arange(padded) < len(requests), np.uint8)
    return [padded, 0, 4096, at_request, at_kv, at_o, at_mask, at_chunk, 1, int(splits)]
