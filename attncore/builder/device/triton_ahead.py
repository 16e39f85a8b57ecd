"""The Triton function that makes the next step out of the last one, in the device's arena, without the host."""

from __future__ import annotations

import triton
import triton.language as tl

from attncore.kernels import codes

_HEADER_ROWS = tl.constexpr(codes.HEADER_ROWS)
_HEADER_RUNNING = tl.constexpr(codes.HEADER_RUNNING)

# Where it finds the words of a step's own fields (``device.ahead``). The first three say what the length is read from:
# its place, the words from row to row, and what is to be added for the position of the next token.
_LENGTHS = tl.constexpr(0)
_LENGTHS_STRIDE = tl.constexpr(1)
_LENGTHS_SHIFT = tl.constexpr(2)
_CONTEXT_LENS = tl.constexpr(3)
_SEQ_LENS = tl.constexpr(4)
_SEQ_START_LOC = tl.constexpr(5)
_POSITIONS = tl.constexpr(6)


@triton.jit
def _next_positions(words, where, i, running):  # type: ignore[no-untyped-def]
    """The position of the token that each of rows ``i`` runs next; -1 behind the running ones."""
    length = tl.load(words + tl.load(where + _LENGTHS) + i * tl.load(where + _LENGTHS_STRIDE), mask=i < running)
    return tl.where(i < running, length.to(tl.int64) + tl.load(where + _LENGTHS_SHIFT), -1)


@triton.jit
def advance_rows(  # type: ignore[no-untyped-def]
    words, where, groups, pages, num_groups: tl.constexpr, num_pages: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """One token more for every running row of the step in ``words``, by one program: lengths, positions, slots, pages.

    The lengths that all else follows from are written last, behind a barrier: threads share rows.
    """
    header = words.to(tl.pointer_type(tl.int64))
    rows, running = tl.load(header + _HEADER_ROWS), tl.load(header + _HEADER_RUNNING)
    for p in range(num_pages):
        size = tl.load(pages + 3 * p + 2)
        before = tl.zeros((), tl.int32)
        at = rows * 0
        while at < rows:
            i = at + tl.arange(0, block)
            position = _next_positions(words, where, i, running)
            count = tl.where(i < running, position // size + 1, 0).to(tl.int32)
            tl.store(words + tl.load(pages + 3 * p) + 1 + i, before + tl.cumsum(count, 0), mask=i < rows)
            tl.store(words + tl.load(pages + 3 * p + 1) + i, (position % size + 1).to(tl.int32), mask=i < running)
            before += tl.sum(count, 0)
            at += block
    at = rows * 0
    while at < rows:
        i = at + tl.arange(0, block)
        position = _next_positions(words, where, i, running)
        starts = words + tl.load(where + _SEQ_START_LOC) + 1 + i
        start = tl.load(starts, mask=i < rows, other=0) + tl.minimum(i + 1, running).to(tl.int32)
        tl.debug_barrier()
        for g in range(num_groups):
            size = tl.load(groups + 4 * g + 3)
            table = tl.load(groups + 4 * g + 1).to(tl.pointer_type(tl.int32))
            ids = tl.load(table + i * tl.load(groups + 4 * g + 2) + position // size, mask=i < running, other=0)
            slots = (words + tl.load(groups + 4 * g)).to(tl.pointer_type(tl.int64)) + i
            tl.store(slots, ids.to(tl.int64) * size + position % size, mask=i < running)
        tl.store(starts, start, mask=i < rows)
        tl.store((words + tl.load(where + _POSITIONS)).to(tl.pointer_type(tl.int64)) + i, position, mask=i < running)
        tl.store(words + tl.load(where + _CONTEXT_LENS) + i, position.to(tl.int32), mask=i < running)
        tl.store(words + tl.load(where + _SEQ_LENS) + i, position.to(tl.int32) + 1, mask=i < running)
        at += block
