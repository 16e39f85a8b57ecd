"""Columns: numbers that an engine keeps for its requests, gathered into each step by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.block_ids import check_row


class ColumnState:
    def __init__(self, values: Any, itemsize: int, per_token: bool, given: Any, num_given: Any, integers: bool) -> None:
        self.values = values.reshape(len(values), -1, itemsize)
        self.width, self.per_token, self.num_given = self.values.shape[1], per_token, num_given
        self.tokens: list[Any] = [None] * len(values)
        self.items = values.view(f"i{itemsize}") if integers and itemsize in (4, 8) else None

    def give(self, place: int, tokens: Any) -> None:
        check_row(place, len(self.tokens))
        self.num_given[place] = 0
        items = None
        if tokens is not None and len(tokens):
            items = np.asarray(tokens).reshape(-1, self.values.shape[2])
            self.num_given[place] = len(items)
        self.tokens[place] = items

    def given(self, place: int) -> Any:
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


def take_items(column: ColumnState, place: int, start: int, count: int, out: Any) -> None:
    given = min(max(int(column.num_given[place]) - start, 0), count)
    own = min(count - given, column.width)
    if given:
        out[:given] = column.tokens[place][start : start + given]
    out[given : given + own] = column.values[place, :own]
    out[given + own :] = 0


def fill_columns(
    columns: list[tuple[ColumnState, Any]], places: Any, computed: Any, query_lens: Any, num_ones: int, num_rows: int,
    num_reqs: int, num_tokens: int,
) -> None:  # fmt: skip
    for column, out in columns:
        if not column.per_token:
            out[:num_rows] = column.values[places[:num_rows], 0]
            out[num_rows:num_reqs] = 0
            continue
        done = 0
        for i in range(num_rows):
            query_len = 1 if i < num_ones else int(query_lens[i])
            take_items(column, places[i], int(computed[i]) - query_len, query_len, out[done : done + query_len])
            done += query_len
        out[done:num_tokens] = 0


def check_tokens(column: ColumnState, places: Any, computed: Any, query_lens: Any, num_rows: int) -> int:
    given = np.maximum(column.num_given[places[:num_rows]], computed[:num_rows])
    lens = query_lens[:num_rows].astype(np.int64)
    lacks = (lens > 1) & (computed[:num_rows] + lens - given > column.width)
    return int(lacks.argmax()) if column.per_token and lacks.any() else -1


def check_tokens_ahead(column: ColumnState, places: Any, computed: Any, query_lens: Any, num_rows: int) -> int:
    given = column.num_given[places[:num_rows]].astype(np.int64)
    has = (query_lens[:num_rows] > 1) & (given - computed[:num_rows] > 1)
    return int(has.argmax()) if column.per_token and has.any() else -1
