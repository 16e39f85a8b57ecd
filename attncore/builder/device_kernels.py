"""Triton kernels of the device's side: the journal into a table, page indices out of it."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_JOURNAL_BLOCK = 256
_PAGES_BLOCK = 512


@triton.jit
def _apply_journal(table, entries, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * block + tl.arange(0, block)
    entry = tl.load(entries + i, mask=i < count, other=0)
    tl.store(table + (entry & 0xFFFFFFFF), (entry >> 32).to(tl.int32), mask=i < count)


@triton.jit
def _gather_pages(table, indptr, out, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    start = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - start
    column = tl.program_id(1) * block + tl.arange(0, block)
    ids = tl.load(table + row.to(tl.int64) * stride + column, mask=column < count, other=0)
    tl.store(out + start.to(tl.int64) + column, ids, mask=column < count)


def apply_journal(table: Any, entries: Any) -> None:
    """Writes entries int64[n] (flat index low, block id high) to ``table`` int32[rows, width]."""
    count = entries.numel()
    _apply_journal[(triton.cdiv(count, _JOURNAL_BLOCK),)](table, entries, count, block=_JOURNAL_BLOCK)


def gather_pages(table: Any, indptr: Any, out: Any, longest: int) -> None:
    """The first ``indptr[i + 1] - indptr[i]`` blocks of each row in turn into ``out``; a row has at most ``longest``."""
    grid = (indptr.numel() - 1, max(triton.cdiv(longest, _PAGES_BLOCK), 1))
    _gather_pages[grid](table, indptr, out, table.stride(0), block=_PAGES_BLOCK)
