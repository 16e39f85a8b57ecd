"""Columns: numbers that an engine keeps for its requests, gathered into each step by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.numba.batch import BATCH_VIEW, BatchState
from attncore.kernels.numba.block_ids import check_row
from attncore.kernels.numba.jit import entry_point, jit
from attncore.kernels.numba.memory import Struct, Words, address_of, bytes_at, lengths_at, longs_at, struct_at, wide

COLUMN = Struct("values", "itemsize", "width", "per_token", "given", "num_given")
"""The C struct ColumnView."""
COLUMN_VIEW = COLUMN.type
OUT = Struct("column", "out")
"""The C struct ColumnOut: the address of a ColumnView, and that of its array in one arena."""
COLUMN_OUT, OUT_BYTES = OUT.type, 8 * len(OUT.names)


class ColumnState(Words):
    def __init__(self, values: Any, itemsize: int, per_token: bool, given: Any, num_given: Any, integers: bool) -> None:
        self.values = values.reshape(len(values), -1, itemsize)
        self.width, self.per_token, self.num_given, self.given = self.values.shape[1], per_token, num_given, given
        self.tokens: list[Any] = [None] * len(values)
        self.items = values.view(f"i{itemsize}") if integers and itemsize in (4, 8) else None
        self._own(
            COLUMN, values=address_of(values, np.uint8), itemsize=itemsize, width=self.width, per_token=per_token,
            given=address_of(given, np.int64), num_given=address_of(num_given, np.int32),
        )  # fmt: skip

    def give(self, place: int, tokens: Any) -> None:
        check_row(place, len(self.tokens))
        items = None if tokens is None or not len(tokens) else np.ascontiguousarray(tokens)
        self.num_given[place] = 0
        self.tokens[place] = items  # the older ones are let go when nothing is read of them
        if items is not None:
            self.given[place] = items.__array_interface__["data"][0]
            self.num_given[place] = len(items) // self.values.shape[2]

    def tokens_of(self, place: int) -> Any:
        check_row(place, len(self.tokens))
        return self.tokens[place]

    def write(self, batch: BatchState, values: list[Any], count: int) -> bool:
        items = self.items
        if items is None or count > batch.capacity or len(values) < count:
            return False
        most = np.iinfo(items.dtype).max
        if not all(type(value) is int and -most <= value <= most for value in values[:count]):
            return False
        items[batch.places[:count], 0] = values[:count]
        return True


@jit
def copy_items(out, source, count, itemsize):
    """``count`` items from one address to another; zeros, where ``source`` is none."""
    if itemsize == 8:
        for k in range(count):
            longs_at(out)[k] = longs_at(source)[k] if source else 0
    elif itemsize == 4:
        for k in range(count):
            lengths_at(out)[k] = lengths_at(source)[k] if source else 0
    else:
        for k in range(count * itemsize):
            bytes_at(out)[k] = bytes_at(source)[k] if source else 0


@jit
def take_items(column, place, start, count, out):
    size = column.itemsize
    given = min(max(lengths_at(column.num_given)[place] - start, 0), count)
    own = min(count - given, column.width)
    copy_items(out, longs_at(column.given)[place] + start * size, given, size)
    copy_items(out + given * size, column.values + place * column.width * size, own, size)
    copy_items(out + (given + own) * size, 0, count - given - own, size)


@jit
def fill_columns(step, batch, query_lens, num_ones, num_rows):
    computed, places = lengths_at(batch.num_computed), lengths_at(batch.places)
    for c in range(step.num_columns):
        target = struct_at(step.columns + c * OUT_BYTES, COLUMN_OUT)
        column, out, done = struct_at(target.column, COLUMN_VIEW), target.out, 0
        size = column.itemsize
        if not column.per_token:
            for i in range(num_rows):
                copy_items(out + i * size, column.values + places[i] * column.width * size, 1, size)
            copy_items(out + num_rows * size, 0, step.num_reqs - num_rows, size)
            continue
        for i in range(num_rows):
            query_len = 1 if i < num_ones else wide(query_lens[i])
            take_items(column, wide(places[i]), wide(computed[i]) - query_len, query_len, out + done * size)
            done += query_len
        copy_items(out + done * size, 0, step.num_tokens - done, size)


@entry_point("int64(int64, int64, int64)")
def check_tokens(column_address, batch_address, query_lens):
    column, batch, lens = (
        struct_at(column_address, COLUMN_VIEW),
        struct_at(batch_address, BATCH_VIEW),
        lengths_at(query_lens),
    )
    for i in range(batch.num_rows):
        computed = wide(lengths_at(batch.num_computed)[i])
        given = max(wide(lengths_at(column.num_given)[lengths_at(batch.places)[i]]), computed)
        if column.per_token and lens[i] > 1 and computed + lens[i] - given > column.width:
            return i
    return -1


@entry_point("int64(int64, int64, int64)")
def check_tokens_ahead(column_address, batch_address, query_lens):
    column, batch, lens = (
        struct_at(column_address, COLUMN_VIEW),
        struct_at(batch_address, BATCH_VIEW),
        lengths_at(query_lens),
    )
    for i in range(batch.num_rows):
        given = wide(lengths_at(column.num_given)[lengths_at(batch.places)[i]])
        if column.per_token and lens[i] > 1 and given - lengths_at(batch.num_computed)[i] > 1:
            return i
    return -1
