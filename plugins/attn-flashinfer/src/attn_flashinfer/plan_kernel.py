"""The Triton kernel that writes FlashInfer's plans of a captured size on the device: one program for each plan key.

What a plan says follows from the page counts of the rows. The fewest pages that a chunk of keys may have, so that there
are no more chunks than blocks of the grid, are found by bisection; then every chunk gets an entry that says of which
row, of which tile of queries, and which of its row's chunks it is.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# int64 words of a plan's row of the table. Places are counted in int32 words from the address, MASK in bytes; -1: none.
(
    ADDRESS, REQUEST, QO_TILE, KV_TILE, O_INDPTR, MERGE_INDPTR, CHUNK, ROWS, MASK,
    PADDED, MOST, LEAST, TILES, LONGEST, EMPTY, QUERY_LEN, PAGE_SIZE, WIDTH,
) = range(18)  # fmt: skip
"""PADDED: entries that there is room for. MOST: chunks that there may be. LEAST: pages of a chunk, at least. TILES: of
a row's queries. LONGEST: pages of a row that are read, at most. EMPTY: whether the search counts a row without pages
as one chunk."""

_STORED = 1024  # entries that a program stores at once
_SMALLEST = 16  # rows that a program has room for, at least: so that few kernels are compiled
# By rows: the fastest by ../../benchmarks/plan_floor.py. Others have 4 warps, and try 4 sizes of chunks at once.
_WARPS, _TRIED = {16: 8, 32: 8, 64: 2}, {16: 16, 32: 16, 64: 16, 128: 16, 256: 16}

# Kernels may read globals that are constants of the compiler alone.
_ADDRESS, _REQUEST, _QO_TILE, _KV_TILE = (tl.constexpr(word) for word in (ADDRESS, REQUEST, QO_TILE, KV_TILE))
_O_INDPTR, _MERGE_INDPTR, _CHUNK, _ROWS = (tl.constexpr(word) for word in (O_INDPTR, MERGE_INDPTR, CHUNK, ROWS))
_MASK, _PADDED, _MOST, _LEAST = (tl.constexpr(word) for word in (MASK, PADDED, MOST, LEAST))
_TILES, _LONGEST, _EMPTY, _QUERY_LEN = (tl.constexpr(word) for word in (TILES, LONGEST, EMPTY, QUERY_LEN))
_PAGE_SIZE, _WIDTH = tl.constexpr(PAGE_SIZE), tl.constexpr(WIDTH)


@triton.jit
def _divided_up(numbers, divisor):  # type: ignore[no-untyped-def]
    """``ceil(numbers / divisor)``, of numbers from 0 on, where it is at most 2**21.

    Integers are divided by thirty instructions or more, one division of floats serves a whole vector: a quotient below
    2**21 is then off by one at most, which the remainder tells.
    """
    numbers += divisor - 1
    quotient = (numbers.to(tl.float32) * (1.0 / divisor.to(tl.float32))).to(tl.int32)
    rest = numbers - quotient * divisor
    return quotient + tl.where(rest >= divisor, 1, 0) - tl.where(rest < 0, 1, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _pages_of_a_chunk(counted, longest, real, where, tried: tl.constexpr):  # type: ignore[no-untyped-def]
    room = tl.load(where + _MOST).to(tl.int32) // tl.load(where + _TILES).to(tl.int32)  # chunks of keys, over all rows
    least = tl.load(where + _LEAST).to(tl.int32)
    # Rows and their pages in one sum. Every row that counts has a chunk; there are no fewer chunks than all pages over
    # those of a chunk, and fewer than that and one more for each row. The least size that fits lies in between.
    both = tl.sum(tl.where(real & (counted > 0), counted.to(tl.int64) + (1 << 32), 0), axis=0)
    before, rows = (both & 0xFFFFFFFF).to(tl.int32) - 1, (both >> 32).to(tl.int32)
    above, below = before // tl.maximum(room, 1) + 1, before // tl.maximum(room - rows, 1) + 1
    low = tl.maximum(tl.where(rows > room, longest, tl.minimum(above, longest)), least)
    high = tl.where(rows < room, tl.minimum(below, longest), longest)
    while low < high:  # a column for each of some sizes between the two; the first that fits is in the next bounds
        apart = (high - low) // (tried + 1) + 1
        sizes = tl.minimum(low + apart * (tl.arange(0, tried) + 1) - 1, high)
        chunks = tl.where(real[:, None], _divided_up(counted[:, None], sizes[None, :]), 0)
        too_small = tl.sum((tl.sum(chunks, axis=0) > room).to(tl.int32), axis=0)
        low = tl.minimum(low + apart * too_small, high)
        high = tl.minimum(low + apart - 1, high)
    return low


# Compiled once for all sizes of as much room: never inside a capture, where the rows begin at another alignment.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["indptr", "table"]
)
def _write_plans(  # type: ignore[no-untyped-def]
    indptr, table, num_rows, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, tried: tl.constexpr
):  # fmt: skip
    where = table + tl.program_id(0) * _WIDTH
    address = tl.load(where + _ADDRESS)
    words = address.to(tl.pointer_type(tl.int32))
    padded, query_len = tl.load(where + _PADDED).to(tl.int32), tl.load(where + _QUERY_LEN).to(tl.int32)
    row = tl.arange(0, rows)
    real = row < num_rows
    pages = tl.load(indptr + row + 1, mask=real, other=0) - tl.load(indptr + row, mask=real, other=0)
    pages = tl.minimum(tl.maximum(pages, 0), tl.load(where + _LONGEST).to(tl.int32))
    read = tl.maximum(pages, 1)
    counted = tl.where(tl.load(where + _EMPTY) != 0, read, pages)
    longest = tl.maximum(tl.max(pages, axis=0), 1)
    size = _pages_of_a_chunk(counted, longest, real, where, tried)
    count = tl.where(real, _divided_up(read, size), 0)
    ends = tl.cumsum(count, axis=0)
    starts = ends - count

    tl.store(words + tl.load(where + _CHUNK), size * tl.load(where + _PAGE_SIZE).to(tl.int32))
    o_indptr = words + tl.load(where + _O_INDPTR)
    tl.store(o_indptr, 0)
    tl.store(o_indptr + 1 + row, ends * query_len, mask=real)
    at = tl.load(where + _ROWS)
    tl.store(words + at, num_rows * query_len, mask=at >= 0)
    at = tl.load(where + _MERGE_INDPTR)
    tl.store(words + at, 0, mask=at >= 0)
    token = query_len * 0
    while token < query_len:
        merged = starts * query_len + (token + 1) * count
        tl.store(words + at + 1 + row * query_len + token, merged, mask=real & (at >= 0))
        token += 1

    requests, kv_tiles = words + tl.load(where + _REQUEST), words + tl.load(where + _KV_TILE)
    at = tl.load(where + _QO_TILE)
    tiles, most_chunks = tl.load(where + _TILES).to(tl.int32), (longest + size - 1) // size
    tile = tiles * 0
    while tile < tiles:
        chunk = tiles * 0
        while chunk < most_chunks:  # once for most batches: many rows have few chunks each
            column = chunk + tl.arange(0, columns)
            entry = (starts * tiles + tile * count)[:, None] + column[None, :]
            used = (column[None, :] < count[:, None]) & (entry < padded)
            tl.store(requests + entry, tl.broadcast_to(row[:, None], (rows, columns)), mask=used)
            tl.store(kv_tiles + entry, tl.broadcast_to(column[None, :], (rows, columns)), mask=used)
            tl.store(words + at + entry, tl.zeros((rows, columns), tl.int32) + tile, mask=used & (at >= 0))
            chunk += columns
        tile += 1

    at = tl.load(where + _MASK)
    if at >= 0:
        total = tl.sum(count, axis=0) * tiles
        valid = address.to(tl.pointer_type(tl.uint8)) + at
        start = padded * 0
        while start < padded:
            entry = start + tl.arange(0, block)
            tl.store(valid + entry, (entry < total).to(tl.uint8), mask=entry < padded)
            start += block


def write_plans(indptr: Any, table: Any, num_rows: int) -> None:
    """Writes the plans of ``num_rows`` rows to the integer workspaces that ``table`` int64[plans, WIDTH] names.

    ``indptr`` int32[num_rows + 1] on the device: where a row's pages start; the only thing that is read of a step.
    """
    rows = max(triton.next_power_of_2(num_rows), _SMALLEST)
    _write_plans[(len(table),)](
        indptr, table, num_rows, rows=rows, columns=max(_STORED // rows, 1), block=512,
        tried=_TRIED.get(rows, 4), num_warps=_WARPS.get(rows, 4),
    )  # fmt: skip
