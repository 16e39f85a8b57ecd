"""TableState: the block table of one KV-cache group, and what the device has not got of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.codes import (
    CACHED_BLOCK,
    CACHED_COLUMN,
    JOURNAL_BLOCK,
    JOURNAL_ENTRY_WORDS,
    JOURNAL_INDEX,
    MOST_COMPARED,
    NO_COLUMN,
    NUM_BLOCKS,
    SYNCED,
)
from attncore.kernels.numba.block_ids import check_row, exceeds, read_ids, readable
from attncore.kernels.numba.jit import entry_point, jit
from attncore.kernels.numba.memory import Struct, Words, address_of, lengths_at, wide
from attncore.kernels.numba.slots import column_of, shift_of

VIEW = Struct(
    "num_computed", "num_blocks", "column", "block", "stale", "num_stale", "table", "width", "tokens", "shift",
    "null_ids",
)  # fmt: skip
"""The C struct TableView: addresses of the state's rows, of ``stale`` and of the table, and the sizes of blocks."""
TABLE_VIEW = VIEW.type
LENGTHS, STATE = "int32[::1]", "int32[:, ::1]"
"""numba's types of arrays; a table is such a one as a state is."""


@jit
def cache_block(view, i, column):
    columns = lengths_at(view.column)
    if column != columns[i]:
        columns[i] = column
        lengths_at(view.block)[i] = lengths_at(view.table)[i * view.width + column]


@jit
def cache_stale_blocks(view):
    computed, stale = lengths_at(view.num_computed), lengths_at(view.stale)
    for k in range(view.num_stale):
        i = wide(stale[k])
        cache_block(view, i, column_of(computed[i], view.tokens))


@jit
def cache_decode_blocks(view, count):
    computed = lengths_at(view.num_computed)
    for i in range(count):
        cache_block(view, i, column_of(computed[i], view.tokens))


@entry_point(f"int64({LENGTHS}, {STATE}, int64, int64, int64, {LENGTHS})")
def find_missing(computed, state, block_size, width, num_rows, out):
    count = 0
    for i in range(num_rows):
        column = column_of(computed[i], block_size)
        if state[NUM_BLOCKS, i] <= column < width:
            out[count] = i
            count += 1
    return count


@jit
def exchange_lengths(values, i, j):
    values[i], values[j] = values[j], values[i]


@entry_point(f"void({STATE}, {STATE}, int64, int64)")
def swap_blocks(state, table, i, j):
    for k in range(max(state[NUM_BLOCKS, i], state[NUM_BLOCKS, j])):
        table[i, k], table[j, k] = table[j, k], table[i, k]
    exchange_lengths(state[NUM_BLOCKS], i, j)
    exchange_lengths(state[CACHED_COLUMN], i, j)
    exchange_lengths(state[CACHED_BLOCK], i, j)
    state[SYNCED, i] = state[SYNCED, j] = 0


@entry_point(f"int64({STATE}, {STATE}, int64, {LENGTHS})")
def write_journal(state, table, num_rows, entries):
    count, room = 0, len(entries) // JOURNAL_ENTRY_WORDS
    for i in range(num_rows):
        column = state[SYNCED, i]
        while column < state[NUM_BLOCKS, i] and count < room:
            entry = JOURNAL_ENTRY_WORDS * count
            entries[entry + JOURNAL_INDEX] = i * table.shape[1] + column
            entries[entry + JOURNAL_BLOCK] = table[i, column]
            count += 1
            column += 1
        state[SYNCED, i] = column
    return count


@entry_point(f"boolean({STATE}, {STATE}, int64, int64, int64, int64)")
def stands(state, table, row, start, passed, each):
    stop, ids = state[NUM_BLOCKS, row], table[row]
    for k in range(max(start, passed), stop):
        if ids[k] < each:
            return False
    for k in range(max(start, each), stop):
        if ids[k] == ids[k - each] and ids[k] >= each:
            return False
    if (stop - start) * stop <= MOST_COMPARED:
        for column in range(start, stop, each):
            for k in range(column):
                if ids[k] == ids[column] and ids[k] >= each:
                    return False
    return True


class TableState(Words):
    num_computed: Any  # the batch's

    def __init__(
        self, state: Any, stale: Any, table: Any, block_size: int, num_blocks: int, kernel_blocks: int
    ) -> None:
        self.state, self.stale, self.table = state, stale, table
        self._own(
            VIEW, num_blocks=address_of(state[NUM_BLOCKS], np.int32), column=address_of(state[CACHED_COLUMN], np.int32),
            block=address_of(state[CACHED_BLOCK], np.int32), stale=address_of(stale, np.int32),
            table=address_of(table, np.int32), width=table.shape[1], tokens=block_size, shift=shift_of(block_size),
            null_ids=kernel_blocks,
        )  # fmt: skip
        self.block_size, self.num_blocks, self.kernel_blocks = block_size, num_blocks, kernel_blocks
        self.capacity, self.width = table.shape

    def follow(self, num_computed: Any) -> None:
        """``num_computed`` has the tokens of the rows that are in the cache."""
        self.num_computed = num_computed
        self.words[VIEW.names.index("num_computed")] = address_of(num_computed, np.int32)

    def start(self, row: int) -> None:
        check_row(row, self.capacity)
        self.state[NUM_BLOCKS, row] = self.state[CACHED_BLOCK, row] = 0
        self.state[CACHED_COLUMN, row] = NO_COLUMN

    def num_columns(self, row: int) -> int:
        check_row(row, self.capacity)
        return int(self.state[NUM_BLOCKS, row])

    def append(self, row: int, ids: Any, passed: int) -> int:
        check_row(row, self.capacity)
        held, each = int(self.state[NUM_BLOCKS, row]), self.kernel_blocks
        array = None if exceeds(ids, (self.width - held) // each) else read_ids(readable(ids), self.num_blocks)
        if array is None or len(array) * each > self.width - held:
            return -1
        columns = (array[:, np.newaxis] * np.int32(each) + np.arange(each, dtype=np.int32)).ravel()
        self.state[NUM_BLOCKS, row] = held + len(columns)  # first: a roll-back clears what the row holds
        self.table[row, held : held + len(columns)] = columns
        if passed >= 0 and not stands(self.state, self.table, row, held, passed, each):
            self.truncate(row, held)
            return -2
        return len(array)

    def truncate(self, row: int, num_blocks: int) -> None:
        check_row(row, self.capacity)
        if not 0 <= num_blocks <= self.state[NUM_BLOCKS, row]:
            return
        self.table[row, num_blocks : self.state[NUM_BLOCKS, row]] = 0
        self.state[NUM_BLOCKS, row] = num_blocks
        self.state[SYNCED, row] = min(self.state[SYNCED, row], num_blocks)
        if self.state[CACHED_COLUMN, row] >= num_blocks:
            self.state[CACHED_COLUMN, row] = NO_COLUMN

    def replace(self, row: int, column: int, block: int) -> None:
        check_row(row, self.capacity)
        check_row(column, int(self.state[NUM_BLOCKS, row]))
        self.table[row, column] = block
        self.state[SYNCED, row] = min(self.state[SYNCED, row], column)
        if self.state[CACHED_COLUMN, row] == column:
            self.state[CACHED_COLUMN, row] = NO_COLUMN

    def needs_block(self, num_rows: int, out: Any) -> int:
        check_row(num_rows, min(self.capacity, len(out)) + 1)
        return int(find_missing(self.num_computed, self.state, self.block_size, self.width, num_rows, out))

    def pass_windows(
        self, num_rows: int, window: int, num_rollback: int, released: list[tuple[int, int, list[int]]]
    ) -> None:
        check_row(num_rows, self.capacity + 1)
        computed = np.maximum(self.num_computed[:num_rows].astype(np.int64) - num_rollback, 0)
        columns = np.maximum(computed - window + 1, 0) // self.block_size
        columns = np.minimum(columns, self.state[NUM_BLOCKS, :num_rows]) // self.kernel_blocks - 1
        rows = np.flatnonzero(columns >= 0)
        rows = rows[self.table[rows, columns[rows] * self.kernel_blocks] >= self.kernel_blocks]
        for row in rows.tolist():
            self._pass(row, int(columns[row]) * self.kernel_blocks, released)

    def _pass(self, row: int, column: int, released: list[tuple[int, int, list[int]]]) -> None:
        each, ids, first, passed = self.kernel_blocks, self.table[row], column, []
        while first >= 0 and ids[first] >= each:
            passed.append(int(ids[first]) // each)
            first -= each
        released.append((row, first // each + 1, passed[::-1]))
        for column_ in range(first + each, column + each):
            self.replace(row, column_, column_ % each)

    def journal(self, num_rows: int, entries: Any) -> int:
        return int(write_journal(self.state, self.table, num_rows, entries))

    def forget_synced(self) -> None:
        self.state[SYNCED] = 0
