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
from attncore.kernels.numba.sequence_checks import ENTRY_COLUMNS, NUM_IDS, count_entries, settle_entries
from attncore.kernels.numba.sequence_fields import fill_entries, fill_entry_pages, fill_entry_rows, pad_entries


class GroupReader(Entrance):
    def __init__(self) -> None:
        super().__init__()
        self.num_seqs = self.num_ids = self.block_size = self.window = 0
        self.encoder_group = -1
        self.rows: list[tuple[int, ...]] = []
        self.tables: list[Any] = []
        self.entries = np.zeros((0, ENTRY_COLUMNS), np.int64)
        self.ids = np.zeros(0, np.int32)

    def read(self, groups: Iterable[Any]) -> bool:
        self.rows, self.tables, self.num_ids, self.encoder_group = [], [], 0, -1
        after_decode = False
        for index, group in enumerate(groups):
            if not isinstance(group, tuple) or len(group) < 3:
                return False
            is_prompt, sequences, hit = group[:3]
            if self.encoder_group < 0 and len(group) > 3 and group[3] is not None:
                self.encoder_group = index
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
            if count > 1:
                if len({sequence[0] for sequence in sequences}) != count:
                    return False
                if len({row[NUM_IDS] < 0 for row in self.rows[first:]}) > 1:
                    return False
        self.num_seqs = len(self.rows)
        self.entries = np.array(self.rows, np.int64).reshape(-1, ENTRY_COLUMNS)
        self.ids = np.concatenate(self.tables) if self.tables else np.zeros(0, np.int32)
        return self.num_seqs > 0

    def _read_sequence(self, sequence: Any, is_prompt: bool, hit: bool) -> bool:
        if not isinstance(sequence, tuple) or len(sequence) < 4:
            return False
        # One after the other, as in C: an object is not asked where the one before it is none.
        if read_int(sequence[0]) is None:
            return False
        if (query_len := read_int(sequence[1])) is None or (context_len := read_int(sequence[2])) is None:
            return False
        if query_len < 1 or context_len < 0 or query_len + context_len > INT32_MAX:
            return False
        count = -1
        if sequence[3] is not None:
            table = read_ids(readable(sequence[3]), INT32_MAX + 1)
            if table is None:
                return False
            count = len(table)
            self.tables.append(table)
        self.rows.append((self.num_ids, count, query_len, context_len, 0, 0, 0, is_prompt, hit))
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
        fill_entry_rows(self.entries, self.ids, table)

    def fill_pages(self, indptr: Any, indices: Any, last_page_len: Any) -> None:
        fill_entry_pages(self.entries, self.ids, self.block_size, indptr, indices, last_page_len)
