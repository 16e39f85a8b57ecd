"""Triton kernels of both transports: an arena read over the bus, the journal into tables, page indices out of them,
exact lengths for overlapped steps; and what adopted steps make of an engine's lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from attncore.arguments import INT32_MAX
from attncore.builder.device.triton_ahead import advance_rows
from attncore.kernels import codes
from attncore.kernels.prepared_launch import Launch, prepared_launch

_JOURNAL_BLOCK = 256
_PAGES_BLOCK = 512
_WORDS = 512  # int32 words of the arena that a program reads
_TOKENS = 256  # that a program corrects
_ROWS = 512  # lengths that a program adds up at once

# Kernels may read globals that are constants of the compiler alone.
_HEADER_LAUNCH = tl.constexpr(codes.HEADER_LAUNCH)
_LAUNCH_SHIFT = tl.constexpr(codes.LAUNCH_SHIFT)
_LAUNCH_PLACE = tl.constexpr((1 << codes.LAUNCH_SHIFT) - 1)
_HEADER_ROWS = tl.constexpr(codes.HEADER_ROWS)
_HEADER_TOKENS = tl.constexpr(codes.HEADER_TOKENS)
_HEADER_RUNNING = tl.constexpr(codes.HEADER_RUNNING)
_RECEIPT_STEP = tl.constexpr(codes.RECEIPT_STEP)
_RECEIPT_AHEAD = tl.constexpr(codes.RECEIPT_AHEAD)
_RECEIPT_LAUNCHED = tl.constexpr(codes.RECEIPT_LAUNCHED)
_PAD_SLOT_ID = tl.constexpr(codes.PAD_SLOT_ID)

# int64 words of a transport's state: the last step that was read, the one read now (-1: none), the ticket, and how many
# steps were run ahead in all.
STATE_WORDS, STATE_TICKET, STATE_AHEAD = 4, 2, 3
_LAST_READ = tl.constexpr(0)
_READ_NOW = tl.constexpr(1)
_TICKET = tl.constexpr(STATE_TICKET)
_AHEAD = tl.constexpr(STATE_AHEAD)
_ADVANCED = tl.constexpr(-2)  # in _READ_NOW: no step was read, the last one was advanced
_AHEAD_ROWS = 256  # at once; not fewer than a program has threads, so that no two of them have a row

# Where ``correct_lengths`` finds the words of a step's own fields.
_PREVIOUS_ROWS = tl.constexpr(0)
_CONTEXT_LENS = tl.constexpr(1)
_SEQ_LENS = tl.constexpr(2)
_SEQ_START_LOC = tl.constexpr(3)
_TOKEN_TO_REQ_INDICES = tl.constexpr(4)
_POSITIONS = tl.constexpr(5)


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
    """The first ``indptr[i + 1] - indptr[i]`` blocks of each row in turn into ``out``; at most ``longest``."""
    grid = (indptr.numel() - 1, max(triton.cdiv(longest, _PAGES_BLOCK), 1))
    _gather_pages[grid](table, indptr, out, table.stride(0), block=_PAGES_BLOCK)


@triton.jit
def _read_arena(  # type: ignore[no-untyped-def]
    pinned, state, arena, tables, words, slots_start, slots_stop, journal, receipt, where, own_slots, own_pages,
    depth: tl.constexpr, stride: tl.constexpr, groups: tl.constexpr, counts: tl.constexpr, ticket: tl.constexpr,
    num_slots: tl.constexpr, num_pages: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    step = tl.load(state + _TICKET) if ticket else tl.load(state + _LAST_READ) + 1
    source = pinned + (tl.maximum(step, 0) % depth) * stride
    header = source.to(tl.pointer_type(tl.int64))
    # Before the header: the host publishes a step and then launches those ahead of it. A replay too many that reads in
    # between would else see no header and steps to run, advance the step before, and the header would never be taken.
    # The mask makes the second load wait for the first: loads that nothing connects may be served in any order.
    launched = tl.load(receipt + _RECEIPT_LAUNCHED)
    launch = tl.load(header + _HEADER_LAUNCH, mask=launched >= 0, other=0)
    # One word says which step it is, how many steps ahead come before, and in which layout it lies: the host may
    # publish the next step, of another size perhaps, while a step ahead or a replay too many runs here. Of two words
    # one could be read before that and one behind it.
    ahead = tl.load(state + _AHEAD)
    place = (journal // 2 + tl.zeros((), tl.int64)) & _LAUNCH_PLACE
    found = (step >= 0) & (launch == ((1 + step + ahead) << _LAUNCH_SHIFT | place))
    program = tl.program_id(0)
    i = program * block + tl.arange(0, block)
    if found:
        if program == 0:
            tl.store(state + _READ_NOW, step)
        tl.store(arena + i, tl.load(source + i, mask=i < words, other=0), mask=i < words)
        first = journal // 2 + tl.zeros((), tl.int64)
        for group in range(groups):
            count = tl.load(header + counts + group)
            table = tl.load(tables + group).to(tl.pointer_type(tl.int32))
            at = program * block
            while at < count:
                k = at + tl.arange(0, block)
                entry = tl.load(header + first + k, mask=k < count, other=0)
                tl.store(table + (entry & 0xFFFFFFFF), (entry >> 32).to(tl.int32), mask=k < count)
                at += tl.num_programs(0) * block
            first += count
    else:
        # Where a replay without a step came in between, the arena holds none any more that could be advanced.
        held = tl.load(arena.to(tl.pointer_type(tl.int64)) + _HEADER_LAUNCH)
        advances = (ahead < launched) & (held > 0)
        if program == 0:
            tl.store(state + _READ_NOW, tl.where(advances, _ADVANCED, -1))
        if advances:
            if program == 0:
                advance_rows(arena, where, own_slots, own_pages, num_slots, num_pages, rows)
        else:  # no such step: no rows, no lengths and padded slots, so that what follows writes to no block
            is_slot = (i >= slots_start) & (i < slots_stop)
            tl.store(arena + i, tl.where(is_slot, _PAD_SLOT_ID, 0), mask=i < words)  # both words of an int64 -1 are -1


@triton.jit
def _gather_all_pages(  # type: ignore[no-untyped-def]
    arena, table, indptr, out, stride, state, receipt, last: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if last:  # noqa: SIM102 - a constexpr, decided when it is compiled
        if (row == 0) & (tl.program_id(1) == 0):
            _receive(state, receipt)
    start = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - start
    num_rows = tl.load(arena.to(tl.pointer_type(tl.int64)) + _HEADER_ROWS)
    # Behind the step's rows stand those of steps before. No row has more than a table's, whatever indptr says: programs
    # that read the arena for a replay too many may not all have seen the step that was published meanwhile.
    count = tl.where(row < num_rows, tl.minimum(count, stride), 0)
    at = tl.program_id(1) * block
    while at < count:
        column = at + tl.arange(0, block)
        ids = tl.load(table + row.to(tl.int64) * stride + column, mask=column < count, other=0)
        tl.store(out + start.to(tl.int64) + column, ids, mask=column < count)
        at += tl.num_programs(1) * block


@triton.jit
def _write_receipt(state, receipt):  # type: ignore[no-untyped-def]
    _receive(state, receipt)


@triton.jit
def _receive(state, receipt):  # type: ignore[no-untyped-def]
    step = tl.load(state + _READ_NOW)
    if step >= 0:
        tl.store(state + _LAST_READ, step)
        tl.store(state + _TICKET, -1)
        tl.store(receipt + _RECEIPT_STEP, step)
    if step == _ADVANCED:
        ahead = tl.load(state + _AHEAD) + 1
        tl.store(state + _AHEAD, ahead)
        tl.store(receipt + _RECEIPT_AHEAD, ahead)


def read_arena(
    pinned: Any, state: Any, arena: Any, tables: Any, nbytes: int, slots: tuple[int, int], depth: int, stride: int,
    groups: int, counts: int, ticket: bool, receipt: Any, ahead: tuple[Any, Any, Any],
) -> None:  # fmt: skip
    """Brings the next step's arena, where its header says that it is there, to the device; its journal to the tables.

    Where it is not there, and ``receipt`` says that the host has launched a step ahead, the last one is advanced: by
    ``ahead``, the Places of ``device.ahead``. ``state`` int64[STATE_WORDS]: the last step that was read; the one read
    now (-1: none, and then the device's arena is a step without rows); the ticket, where that says which step comes
    next; steps run ahead in all. ``tables`` int64[groups]: addresses. ``slots``: the bytes that are slots.
    """
    grid = (max(triton.cdiv(nbytes // 4, _WORDS), 8),)
    _read_arena[grid](
        pinned.view(torch.int32), state, arena.view(torch.int32), tables, nbytes // 4, slots[0] // 4, slots[1] // 4,
        nbytes // 4, receipt, *ahead, depth=depth, stride=stride // 4, groups=groups, counts=counts, ticket=ticket,
        num_slots=len(ahead[1]), num_pages=len(ahead[2]), rows=_AHEAD_ROWS, block=_WORDS,
    )  # fmt: skip


def gather_all_pages(
    arena: Any, table: Any, indptr: Any, out: Any, state: Any, receipt: Any, *, last: bool
) -> None:  # fmt: skip
    """``gather_pages`` for as many rows as the arena's header says, of any length, in a launch of fixed shape.

    Its first program writes the receipt, where no other node comes behind (``last``): the arena has been read by then.
    """
    grid = (indptr.numel() - 1, min(triton.cdiv(table.shape[1], _PAGES_BLOCK), 4))
    _gather_all_pages[grid](
        arena, table, indptr, out, table.stride(0), state, receipt, last=last, block=_PAGES_BLOCK
    )  # fmt: skip


def write_receipt(state: Any, receipt: Any) -> None:
    """The step's number to a pinned word, where the arena was read."""
    _write_receipt[(1,)](state, receipt)


@triton.jit
def _correct_tokens(  # type: ignore[no-untyped-def]
    words, rejected, where, groups, num_groups: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    num_tokens = tl.load(words.to(tl.pointer_type(tl.int64)) + _HEADER_TOKENS)
    t = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.load(words + tl.load(where + _TOKEN_TO_REQ_INDICES) + t, mask=t < num_tokens, other=0)
    was = tl.load(words + tl.load(where + _PREVIOUS_ROWS) + row, mask=t < num_tokens, other=-1)
    fewer = tl.maximum(tl.load(rejected + was, mask=was >= 0, other=0), 0)
    positions = (words + tl.load(where + _POSITIONS)).to(tl.pointer_type(tl.int64)) + t
    position = tl.maximum(tl.load(positions, mask=t < num_tokens, other=0) - fewer, 0)
    tl.store(positions, position, mask=t < num_tokens)
    for g in range(num_groups):
        size = tl.load(groups + 4 * g + 3)
        table = tl.load(groups + 4 * g + 1).to(tl.pointer_type(tl.int32))
        slots = (words + tl.load(groups + 4 * g)).to(tl.pointer_type(tl.int64)) + t
        changed = (t < num_tokens) & (fewer > 0)
        changed = changed & (tl.load(slots, mask=changed, other=-1) >= 0)
        ids = tl.load(table + row * tl.load(groups + 4 * g + 2) + position // size, mask=changed, other=0)
        tl.store(slots, ids.to(tl.int64) * size + position % size, mask=changed)


@triton.jit
def _correct_rows(  # type: ignore[no-untyped-def]
    words, rejected, where, pages, num_pages: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    header = words.to(tl.pointer_type(tl.int64))
    num_rows, running = tl.load(header + _HEADER_ROWS), tl.load(header + _HEADER_RUNNING)
    i = tl.arange(0, block)
    was = tl.load(words + tl.load(where + _PREVIOUS_ROWS) + i, mask=i < num_rows, other=-1)
    context_lens, seq_lens = words + tl.load(where + _CONTEXT_LENS), words + tl.load(where + _SEQ_LENS)
    context = tl.load(context_lens + i, mask=i < num_rows, other=0)
    fewer = tl.minimum(tl.maximum(tl.load(rejected + was, mask=was >= 0, other=0), 0), context)
    seq_len = tl.load(seq_lens + i, mask=i < num_rows, other=0) - fewer
    tl.debug_barrier()  # where there are more threads than rows, several have a row: none writes before all have read
    tl.store(context_lens + i, context - fewer, mask=i < num_rows)
    tl.store(seq_lens + i, seq_len, mask=i < num_rows)
    tl.store(words + tl.load(where + _SEQ_START_LOC) + 1 + i, tl.cumsum(seq_len, 0), mask=i < num_rows)
    seq_len = tl.where(i < running, seq_len, 0)  # padded rows have a length, and no pages
    for p in range(num_pages):
        size = tl.load(pages + 3 * p + 2).to(tl.int32)
        count = (seq_len + size - 1) // size
        last = tl.where(seq_len > 0, seq_len - (count - 1) * size, 0)
        tl.store(words + tl.load(pages + 3 * p) + 1 + i, tl.cumsum(count, 0), mask=i < num_rows)
        tl.store(words + tl.load(pages + 3 * p + 1) + i, last, mask=i < num_rows)


def correct_lengths(
    arena: Any, rejected: Any, where: Any, groups: Any, pages: Any, max_rows: int, max_tokens: int
) -> None:
    """Takes what was rejected of the last step from a step's lengths, positions, slots and pages, on the device.

    ``rejected`` int32 by row of the last step. ``where`` int64[6]: words of previous_rows, context_lens, seq_lens,
    seq_start_loc, token_to_req_indices and positions in ``arena``; ``groups`` int64[g, 4]: slots, table's address and
    stride, block size; ``pages`` int64[p, 3]: indptr, last page lengths, block size. How many rows and tokens there are
    says the arena's header.
    """
    words = arena.view(torch.int32)
    grid = (triton.cdiv(max_tokens, _TOKENS),)
    _correct_tokens[grid](words, rejected, where, groups, num_groups=len(groups), block=_TOKENS)
    block = max(triton.next_power_of_2(max_rows), 16)
    _correct_rows[(1,)](words, rejected, where, pages, num_pages=len(pages), block=block)


# Compiled once for all steps: not again where a number is 1 or 16, or a tensor begins in the middle of another.
@triton.jit(
    do_not_specialize=["num_reqs", "stride", "columns"],
    do_not_specialize_on_alignment=["seq_lens", "table", "words", "pages"],
)
def _sum_lengths(  # type: ignore[no-untyped-def]
    seq_lens, table, words, pages, num_reqs, stride, columns,
    gap: tl.constexpr, page_size: tl.constexpr, gathers: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    most = columns * page_size
    i = tl.arange(0, rows)
    pages_before, keys_before = tl.zeros((rows,), tl.int32), tl.zeros((rows,), tl.int32)
    at = row * 0
    while at < row:
        lengths = tl.load(seq_lens + at + i, mask=at + i < row, other=0)
        lengths = tl.minimum(tl.maximum(lengths, 0), most)
        pages_before += lengths // page_size + (lengths % page_size > 0).to(tl.int32)
        keys_before += lengths
        at += rows
    start, keys = tl.sum(pages_before, 0), tl.sum(keys_before, 0)
    seq_len = tl.minimum(tl.maximum(tl.load(seq_lens + row, mask=row < num_reqs, other=0), 0), most)
    count = seq_len // page_size + (seq_len % page_size > 0).to(tl.int32)
    tl.store(words + row, start)
    tl.store(words + 2 * gap + row, keys)
    tl.store(words + gap + row, tl.where(count > 0, seq_len - (count - 1) * page_size, 0), mask=row < num_reqs)
    tl.store(words + row + 1, start + count, mask=row + 1 == num_reqs)
    tl.store(words + 2 * gap + row + 1, keys + seq_len, mask=row + 1 == num_reqs)
    if gathers:
        at = tl.program_id(1) * block
        while at < count:
            column = at + tl.arange(0, block)
            ids = tl.load(table + row.to(tl.int64) * stride + column, mask=column < count, other=0)
            tl.store(pages + start.to(tl.int64) + column, ids, mask=column < count)
            at += tl.num_programs(1) * block


class SumLengths:
    """Page pointers, last page lengths and sums of lengths into ``words``, ``gap`` elements apart; pages where asked.

    Compiled when this is made, and launched without Triton's own search for what was compiled, which costs more than
    the launch. Its device must be the current one.
    """

    def __init__(self, words: Any, gap: int, page_size: int) -> None:
        self._words, self._gap, self._page_size = words, gap, page_size
        self._launches: dict[bool, Launch] = {}
        none = words[:0]
        for pages in (None, none):
            compiled = self(none, none.view(0, 1), pages, 0, 0)
            if compiled is not None:  # the interpreter compiles nothing
                gathers, at = pages is not None, words.data_ptr()
                trial = at, at, at, at, 0, 0, 0, gap, page_size, gathers, _ROWS, _PAGES_BLOCK
                self._launches[gathers] = prepared_launch(compiled, words.get_device(), *trial)

    def __call__(self, seq_lens: Any, table: Any, pages: Any | None, columns: int, longest: int) -> Any:
        """Of ``seq_lens`` int32[n]; ``pages``, where given, gets each row's blocks of ``table`` int32[n, >= columns].

        A length is taken as no less than 0 and no more than ``columns`` hold, whatever the device says; ``longest`` is
        the host's bound, in pages, by which alone the launch is shaped.
        """
        if self._launch_of(table, pages) is not None:
            self.prepared(seq_lens, table, pages, columns)(longest)
            return None
        tensors, others = self._arguments(seq_lens, table, pages, columns)
        return _sum_lengths[others[0] or 1, _blocks(longest, pages), 1](*tensors, *others)

    def prepared(self, seq_lens: Any, table: Any, pages: Any | None, columns: int) -> Callable[[int], Any]:
        """The same as a call of ``longest`` alone, for tensors that stay where they are."""
        launch = self._launch_of(table, pages)
        if launch is None:
            return partial(self, seq_lens, table, pages, columns)
        tensors, others = self._arguments(seq_lens, table, pages, columns)
        rows, arguments = others[0] or 1, (*(tensor.data_ptr() for tensor in tensors), *others)

        def launch_over(longest: int) -> None:
            launch(rows, _blocks(longest, pages), *arguments)

        return launch_over

    def _launch_of(self, table: Any, pages: Any | None) -> Launch | None:
        return self._launches.get(pages is not None) if table.stride(0) <= INT32_MAX else None

    def _arguments(
        self, seq_lens: Any, table: Any, pages: Any | None, columns: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        tensors = seq_lens, table, self._words, self._words if pages is None else pages
        others = seq_lens.shape[0], table.stride(0), columns, self._gap, self._page_size, pages is not None
        return tensors, (*others, _ROWS, _PAGES_BLOCK)


def _blocks(longest: int, pages: Any | None) -> int:
    """How many programs write the pages of a row."""
    return 1 if pages is None or longest <= _PAGES_BLOCK else min(-(-longest // _PAGES_BLOCK), 8)
