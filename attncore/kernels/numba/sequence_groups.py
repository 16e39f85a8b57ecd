"""GroupReader: reads the sequences of a step of the list builder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from attncore.arguments import INT32_MAX, own_items
from attncore.kernels.codes import OK, TOO_MANY_SEQ_TOKENS
from attncore.kernels.numba.block_ids import read_ids, read_int, readable
from attncore.kernels.numba.entrance import Entrance
from attncore.kernels.numba.field_functions import check_columns
from attncore.kernels.numba.jit import entry_point, jit
from attncore.kernels.numba.memory import (
    LENGTH,
    SLOT,
    Struct,
    Words,
    address_of,
    lengths_at,
    longs_at,
    number,
    struct_at,
)
from attncore.kernels.numba.objects import (
    ITEMS,
    SIZE,
    TYPE,
    Layout,
    arrays_are_known,
    copy_array,
    find_layout,
    read_small_int,
    size_of_array,
)
from attncore.kernels.numba.sequence_checks import (
    CONTEXT_LEN,
    ENTRY_COLUMNS,
    FIRST_ID,
    HIT,
    IS_PROMPT,
    NUM_IDS,
    QUERY_LEN,
    SEQ_ID,
    count_entries,
    settle_entries,
)
from attncore.kernels.numba.sequence_fields import fill_entries, fill_entry_pages, fill_entry_rows, pad_entries

OBJECTS = "list_type", "tuple_type", "int_type", "true", "false", "none"
ARRAYS = "array_type", "int32", "int64"
READER = Struct(
    "groups", "group_type", "sequence_type", "entries", "entries_capacity", "ids", "ids_capacity",  # first: _read_into
    *OBJECTS, *ARRAYS, *Layout._fields, "num_seqs", "num_ids", "encoder_group",
    "placeholder_group",
)  # fmt: skip
"""A GroupReader's buffers, and the addresses of the objects that it tells others by."""
READER_VIEW = READER.type
READ, NO_ROOM, OTHER = range(3)
"""What ``read_groups`` answers: it has read all, its buffers are too small, or there is something else to be read."""
MOST_IN_A_GROUP = 64
"""Sequences of a group that are compared in pairs."""


@jit
def items_of(view, sequence):
    """The addresses of the items of a list or tuple."""
    in_list = longs_at(sequence + TYPE)[0] == view.list_type
    return longs_at(longs_at(sequence + ITEMS)[0] if in_list else sequence + view.tuple_items)


@jit
def item_of(view, sequence, k):
    return items_of(view, sequence)[k]


@jit
def size_of(sequence):
    return longs_at(sequence + SIZE)[0]


@jit
def read_table(view, table, count):
    """Reads block ids behind those that were read before."""
    if view.num_ids + count > view.ids_capacity:
        return NO_ROOM
    items, out = items_of(view, table), lengths_at(view.ids + LENGTH * view.num_ids)
    for k in range(count):
        value = read_small_int(view, items[k])
        if value < 0 or value > INT32_MAX:
            return OTHER
        out[k] = value
    view.num_ids += count
    return READ


@jit
def read_array(view, table, count):
    """``read_table`` of an array."""
    if view.num_ids + count > view.ids_capacity:
        return NO_ROOM
    if not copy_array(view, table, count, lengths_at(view.ids + LENGTH * view.num_ids)):
        return OTHER
    view.num_ids += count
    return READ


@jit
def read_sequence(view, sequence, is_prompt, hit):
    if longs_at(sequence + TYPE)[0] != view.sequence_type or size_of(sequence) < 4:
        return OTHER
    if view.num_seqs == view.entries_capacity:
        return NO_ROOM
    query_len = read_small_int(view, item_of(view, sequence, 1))
    context_len = read_small_int(view, item_of(view, sequence, 2))
    if query_len < 1 or context_len < 0 or query_len + context_len > INT32_MAX:
        return OTHER
    entry, table = longs_at(view.entries + SLOT * ENTRY_COLUMNS * view.num_seqs), item_of(view, sequence, 3)
    entry[SEQ_ID] = read_small_int(view, item_of(view, sequence, 0))
    entry[FIRST_ID], entry[NUM_IDS] = view.num_ids, -1
    entry[QUERY_LEN], entry[CONTEXT_LEN], entry[IS_PROMPT], entry[HIT] = query_len, context_len, is_prompt, hit
    view.num_seqs += 1
    if table == view.none:
        return READ
    kind = longs_at(table + TYPE)[0]
    if kind == view.array_type:
        entry[NUM_IDS] = size_of_array(view, table)
        return OTHER if entry[NUM_IDS] < 0 else read_array(view, table, entry[NUM_IDS])
    if kind != view.list_type and kind != view.tuple_type:
        return OTHER
    entry[NUM_IDS] = size_of(table)
    return read_table(view, table, size_of(table))


@jit
def are_told_apart(view, count):
    """Whether the last ``count`` sequences have ids of their own, and all have blocks or none."""
    first = view.num_seqs - count
    last = longs_at(view.entries + SLOT * ENTRY_COLUMNS * (view.num_seqs - 1))
    for i in range(first, view.num_seqs):
        entry = longs_at(view.entries + SLOT * ENTRY_COLUMNS * i)
        if entry[SEQ_ID] < 0 or (entry[NUM_IDS] < 0) != (last[NUM_IDS] < 0):
            return False
        for j in range(first, i):
            if entry[SEQ_ID] == longs_at(view.entries + SLOT * ENTRY_COLUMNS * j)[SEQ_ID]:
                return False
    return True


@jit
def read_group(view, group, index):
    if longs_at(group + TYPE)[0] != view.group_type or size_of(group) < 3:
        return OTHER
    is_prompt, sequences, hit = item_of(view, group, 0), item_of(view, group, 1), item_of(view, group, 2)
    if view.encoder_group < 0 and size_of(group) > 3 and item_of(view, group, 3) != view.none:
        view.encoder_group = index
    if view.placeholder_group < 0 and size_of(group) > 5 and item_of(view, group, 5) != view.none:
        view.placeholder_group = index
    if (is_prompt != view.true and is_prompt != view.false) or (hit != view.true and hit != view.false):
        return OTHER
    if longs_at(sequences + TYPE)[0] != view.list_type or not 0 < size_of(sequences) <= MOST_IN_A_GROUP:
        return OTHER
    before = longs_at(view.entries + SLOT * ENTRY_COLUMNS * (view.num_seqs - 1))
    if view.num_seqs and is_prompt == view.true and not before[IS_PROMPT]:
        return OTHER
    for k in range(size_of(sequences)):
        done = read_sequence(view, item_of(view, sequences, k), is_prompt == view.true, hit == view.true)
        if done != READ:
            return done
    return READ if are_told_apart(view, size_of(sequences)) else OTHER


@entry_point("int64(int64)")
def read_groups(reader):
    """Reads the groups into the reader's buffers. No other code runs meanwhile: what is read does not change."""
    view = struct_at(reader, READER_VIEW)
    view.num_seqs, view.num_ids, view.encoder_group, view.placeholder_group = 0, 0, -1, -1
    for index in range(size_of(view.groups)):
        done = read_group(view, item_of(view, view.groups, index), index)
        if done != READ:
            return done
    return READ if view.num_seqs else OTHER


class GroupReader(Words, Entrance):
    num_seqs = number(READER, "num_seqs")
    num_ids = number(READER, "num_ids")
    encoder_group = number(READER, "encoder_group")
    placeholder_group = number(READER, "placeholder_group")

    def __init__(self) -> None:
        super().__init__()
        layout, kinds = find_layout(), (list, tuple, int, True, False, None)
        self._own(READER, **dict(zip(OBJECTS, map(id, kinds), strict=True)), **(layout._asdict() if layout else {}))
        if layout and arrays_are_known():
            for name, value in zip(ARRAYS, (np.ndarray, np.dtype(np.int32), np.dtype(np.int64)), strict=True):
                self.words[READER.names.index(name)] = id(value)
        self._read_groups = read_groups.ready() if layout else None
        self.block_size = self.window = 0
        self.rows: list[tuple[int, ...]] = []
        self.tables: list[Any] = []
        self._entries = self.entries = np.zeros((64, ENTRY_COLUMNS), np.int64)
        self._ids = self.ids = np.zeros(4096, np.int32)

    def read(self, groups: Iterable[Any]) -> bool:
        if type(groups) is not list and type(groups) is not tuple:
            groups = list(groups)
        if self._read_groups is not None and self._read_in_one(groups):
            return True
        return self._read_objects(groups)

    def _read_in_one(self, groups: list[Any] | tuple[Any, ...]) -> bool:
        """Reads groups of lists of ints and arrays in one compiled call; False where one is not such, or malformed."""
        group: Any = groups[0] if groups else None
        if not issubclass(type(group), tuple) or tuple.__len__(group) < 3:
            return False
        sequences = tuple.__getitem__(group, 1)
        if type(sequences) is not list or not sequences or not issubclass(type(sequence := sequences[0]), tuple):
            return False
        while (done := self._read_into(groups, type(group), type(sequence))) == NO_ROOM:
            if self.num_seqs == len(self._entries):
                self._entries = np.zeros((2 * len(self._entries), ENTRY_COLUMNS), np.int64)
            else:
                self._ids = np.zeros(2 * len(self._ids), np.int32)
        self.entries, self.ids = self._entries[: self.num_seqs], self._ids[: self.num_ids]
        return bool(done == READ)

    def _read_into(self, groups: Any, group_type: type, sequence_type: type) -> int:
        """``read_groups`` with the buffers of now: an interrupt may have left the struct with others."""
        found = id(groups), id(group_type), id(sequence_type), address_of(self._entries, np.int64), len(self._entries)
        for index, value in enumerate((*found, address_of(self._ids, np.int32), len(self._ids))):
            self.words[index] = value
        return self._read_groups(self.address)  # type: ignore[misc, no-any-return]

    def _read_objects(self, groups: list[Any] | tuple[Any, ...]) -> bool:
        """Reads groups of any objects, one after the other."""
        self.rows, self.tables, self.num_ids, self.encoder_group, self.placeholder_group = [], [], 0, -1, -1
        after_decode = False
        for index, group in enumerate(groups):
            if not isinstance(group, tuple) or len(items := own_items(group)) < 3:
                return False
            is_prompt, sequences, hit = items[:3]
            if self.encoder_group < 0 and len(items) > 3 and items[3] is not None:
                self.encoder_group = index
            if self.placeholder_group < 0 and len(items) > 5 and items[5] is not None:
                self.placeholder_group = index
            if type(is_prompt) is not bool or type(hit) is not bool:
                return False
            if type(sequences) is not list:  # a list itself is read, as in C: an object in it may empty it
                sequences = own_items(sequences)
            first = len(self.rows)
            for sequence in sequences:
                if not self._read_sequence(sequence, is_prompt, hit):
                    return False
            count = len(self.rows) - first
            if not count or (is_prompt and after_decode):
                return False
            after_decode = after_decode or not is_prompt
            if len({row[SEQ_ID] for row in self.rows[first:]}) != count:
                return False
            if len({row[NUM_IDS] < 0 for row in self.rows[first:]}) > 1:
                return False
        self.num_seqs = len(self.rows)
        self.entries = np.array(self.rows, np.int64).reshape(-1, ENTRY_COLUMNS)
        self.ids = np.concatenate(self.tables) if self.tables else np.zeros(0, np.int32)
        return len(self.rows) > 0

    def _read_sequence(self, sequence: Any, is_prompt: bool, hit: bool) -> bool:
        if not isinstance(sequence, tuple) or len(items := own_items(sequence)) < 4:
            return False
        # One after the other, as in C: an object is not asked where the one before it is none.
        if (seq_id := read_int(items[0])) is None:
            return False
        if (query_len := read_int(items[1])) is None or (context_len := read_int(items[2])) is None:
            return False
        if query_len < 1 or context_len < 0 or query_len + context_len > INT32_MAX:
            return False
        count = -1
        if items[3] is not None:
            table = read_ids(readable(items[3]), INT32_MAX + 1)
            if table is None:
                return False
            count = len(table)
            self.tables.append(table)
        self.rows.append((seq_id, self.num_ids, count, query_len, context_len, 0, 0, 0, is_prompt, hit))
        self.num_ids += max(count, 0)
        return True

    def measure(
        self, block_size: int, window: int, chunked_prefill: bool, hit_anywhere: bool, multi_token_decode: bool
    ) -> tuple[int, ...]:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        if window < 0:
            raise ValueError(f"window: {window} is below 0")
        self.block_size, self.window = block_size, window
        code, row, token = settle_entries(
            self.entries, block_size, window, chunked_prefill, hit_anywhere, multi_token_decode
        )
        if code != OK:
            return code, row, token, *[0] * 11
        totals = count_entries(self.entries, block_size)
        num_tokens, num_seq_tokens, _, _, _, pages, *_ = totals
        if max(num_tokens, num_seq_tokens, pages) > INT32_MAX:
            code = TOO_MANY_SEQ_TOKENS
        return code, 0, 0, *totals

    def fill(
        self, pad: int, slot_mapping: Any, positions: Any, token_to_req_indices: Any, seq_lens: Any, context_lens: Any,
        query_lens: Any, query_start_loc: Any, seq_start_loc: Any, logits_indices: Any,
    ) -> None:  # fmt: skip
        fill_entries(
            self.entries, self.ids, self.block_size, self.window, slot_mapping, positions, token_to_req_indices,
            seq_lens, context_lens, query_lens, query_start_loc, seq_start_loc, logits_indices,
        )  # fmt: skip
        if pad:
            pad_entries(
                self.num_seqs, pad, slot_mapping, positions, token_to_req_indices, seq_lens, query_start_loc,
                seq_start_loc,
            )  # fmt: skip

    def fill_table(self, table: Any) -> None:
        check_columns(table)
        address = table.__array_interface__["data"][0]
        fill_entry_rows(self.entries, self.ids, address, *table.shape, table.strides[0])

    def fill_pages(self, indptr: Any, indices: Any, last_page_len: Any) -> None:
        fill_entry_pages(self.entries, self.ids, self.block_size, indptr, indices, last_page_len)
