"""AdoptedRows: the host arrays and counts of a step whose lengths an engine gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.codes import (
    BEYOND_TABLE,
    OK,
    QUERY_NOT_CAPTURED,
    SLOTS_NOT_PADDED,
    STARTS_FALL,
    STARTS_NOT_AT_0,
    TOO_FEW_SLOTS,
    TOO_LONG,
    TOO_MANY_ROWS,
    TOO_MANY_SEQ_TOKENS,
    TOO_MANY_TOKENS,
    TOO_SHORT,
)
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.step_arena import check_length

INT32_MAX = 2**31 - 1
OF_ROWS = ("query_lens", "logits_indices", "seq_lens", "context_lens", "paged_kv_last_page_len", "_lengths")
OF_STARTS = ("query_start_loc", "seq_start_loc", "paged_kv_indptr", "_starts")


@jit
def pages_of(seq_len, block_size):
    return (seq_len - 1) // block_size + 1 if seq_len else 0


def copy_lengths(out: Any, given: Any) -> None:
    out[:] = given


@jit
def check_starts(starts, num_slots, max_num_tokens):
    if starts[0] != 0:
        return STARTS_NOT_AT_0, 0
    row = 0
    for i in range(len(starts) - 1):
        row = i
        if starts[i + 1] < starts[i]:
            return STARTS_FALL, row
    if starts[-1] > max_num_tokens:
        return TOO_MANY_TOKENS, row
    return (TOO_FEW_SLOTS if starts[-1] > num_slots else OK), row


@jit
def check_lengths(starts, lengths, max_model_len, most, pad_seq_len):
    total, row = np.int64(len(lengths)) * pad_seq_len, 0
    for i in range(len(lengths)):
        row = i
        if lengths[i] < starts[i + 1] - starts[i]:
            return TOO_SHORT, row
        if lengths[i] > max_model_len:
            return TOO_LONG, row
        if lengths[i] > most:
            return BEYOND_TABLE, row
        total += lengths[i]
    return (TOO_MANY_SEQ_TOKENS if total > INT32_MAX else OK), row


@jit
def count_rows(starts, decode_threshold):
    max_query_len, num_actual_reqs, num_decodes, max_decode_query_len = 0, 0, 0, 0
    one_length, shorter = True, False
    for i in range(len(starts) - 1):
        query_len = int(starts[i + 1] - starts[i])
        if query_len == 0:
            shorter = True
            continue
        one_length = one_length and not shorter and (i == 0 or query_len == max_query_len)
        max_query_len = max(max_query_len, query_len)
        num_actual_reqs = i + 1
        if query_len <= decode_threshold and num_decodes == i:
            num_decodes = i + 1
            max_decode_query_len = max(max_decode_query_len, query_len)
    return max_query_len, num_actual_reqs, num_decodes, max_decode_query_len, one_length


def longest_keys(lengths: Any, num_decodes: int, num_rows: int, most: int) -> tuple[int, int]:
    if lengths is None:
        return most if num_decodes else 0, most if num_rows > num_decodes else 0
    decodes, prefills = lengths[:num_decodes], lengths[num_decodes:num_rows]
    return int(decodes.max(initial=0)), int(prefills.max(initial=0))


@jit
def fill_starts(starts, query_start_loc, query_lens, logits_indices):
    query_start_loc[0] = 0
    for i in range(len(query_lens)):
        query_len = starts[i + 1] - starts[i]
        query_start_loc[i + 1] = starts[i + 1]
        query_lens[i] = query_len
        logits_indices[i] = starts[i + 1] - 1 if query_len else 0


@jit
def fill_lengths(lengths, query_lens, block_size, seq_lens, context_lens, seq_start_loc, indptr, last_page_len):
    seq_start_loc[0] = indptr[0] = 0
    for i in range(len(query_lens)):
        seq_len = np.int64(lengths[i])
        seq_lens[i] = seq_len
        context_lens[i] = seq_len - query_lens[i] if query_lens[i] else 0
        seq_start_loc[i + 1] = seq_start_loc[i] + seq_len
        pages = pages_of(seq_len, block_size)
        indptr[i + 1] = indptr[i] + pages
        last_page_len[i] = seq_len - (pages - 1) * block_size if pages else 0


def named_counts(counts: dict[str, Any], captured_query_len: int, largest: int) -> dict[str, int]:
    if counts["use_cuda_graph"]:
        counts["num_tokens"] = counts["num_decode_tokens"] = counts["num_reqs"] * captured_query_len
        counts["max_decode_seq_len"] = max(counts["max_decode_seq_len"], counts["max_prefill_seq_len"])
        counts["max_prefill_seq_len"], counts["max_decode_query_len"] = 0, captured_query_len
    if largest:
        counts["max_decode_seq_len"], counts["max_query_len"] = largest, captured_query_len
    counts["max_seq_len"] = max(counts["max_decode_seq_len"], counts["max_prefill_seq_len"])
    counts["num_prefills"] = 0 if counts["use_cuda_graph"] else counts["num_reqs"] - counts["num_decodes"]
    counts["num_prefill_tokens"] = counts["num_tokens"] - counts["num_decode_tokens"]
    return counts


class AdoptedRows:
    def __init__(
        self, fields: dict[str, Any], max_num_reqs: int, max_num_tokens: int, block_size: int, max_model_len: int,
        decode_threshold: int, pad_seq_len: int,
    ) -> None:  # fmt: skip
        for name in OF_ROWS + OF_STARTS:
            check_length(name, len(fields[name]), max_num_reqs + (name in OF_STARTS))
        self.fields, self.block_size = fields, block_size
        self.max_num_reqs, self.max_num_tokens = max_num_reqs, max_num_tokens
        self.max_model_len, self.decode_threshold, self.pad_seq_len = max_model_len, decode_threshold, pad_seq_len

    def fill(
        self, starts: Any, lengths: Any, num_slots: int, columns: int, captured_query_len: int, uniform: bool,
        capturing: bool,
    ) -> dict[str, int] | tuple[int, int]:  # fmt: skip
        count, most = len(starts) - 1, min(columns, INT32_MAX // self.block_size) * self.block_size
        if not 0 <= count <= self.max_num_reqs:
            return TOO_MANY_ROWS, 0
        own_starts, known = self.fields["_starts"][: count + 1], None
        copy_lengths(own_starts, starts)
        code, row = check_starts(own_starts, num_slots, self.max_num_tokens)
        if code != OK:
            return int(code), int(row)
        if lengths is not None:
            if len(lengths) != count:
                return TOO_MANY_ROWS, count
            known = self.fields["_lengths"][:count]
            copy_lengths(known, lengths)
            code, row = check_lengths(own_starts, known, self.max_model_len, most, self.pad_seq_len)
            if code != OK:
                return int(code), int(row)
        most = min(most, self.max_model_len)
        max_query_len, num_actual_reqs, num_decodes, max_decode_query_len, one_length = count_rows(
            own_starts, self.decode_threshold
        )
        num_tokens, room = int(own_starts[-1]), count * captured_query_len
        fits = captured_query_len > 0 and max_query_len <= captured_query_len
        padded = fits and num_slots == room and (
            # Of one token a row, token i is of row i.
            (one_length and max_query_len in (0, captured_query_len)) or (not uniform and captured_query_len > 1)
        )  # fmt: skip
        if padded:
            num_decodes = num_actual_reqs
        elif capturing:
            return QUERY_NOT_CAPTURED, 0
        elif fits and num_actual_reqs < count and num_slots < room:
            return SLOTS_NOT_PADDED, count
        if padded and most < self.pad_seq_len:
            return BEYOND_TABLE, 0
        num_rows = count if padded else num_actual_reqs
        if padded and known is not None:
            np.maximum(known, self.pad_seq_len, out=known)
        longest_decode, longest_prefill = longest_keys(known, num_decodes, num_rows, most)
        fields = self.fields
        of_rows = {name: fields[name][:num_rows] for name in OF_ROWS}
        fill_starts(own_starts, fields["query_start_loc"], of_rows["query_lens"], of_rows["logits_indices"])
        if known is not None:
            fill_lengths(
                known, of_rows["query_lens"], self.block_size, of_rows["seq_lens"], of_rows["context_lens"],
                fields["seq_start_loc"], fields["paged_kv_indptr"], of_rows["paged_kv_last_page_len"],
            )  # fmt: skip
        counts = {
            "num_reqs": num_rows,
            "num_tokens": num_tokens,
            "num_decodes": num_decodes,
            "num_decode_tokens": int(own_starts[num_decodes]),
            "max_query_len": max_query_len,
            "max_prefill_seq_len": longest_prefill,
            "max_decode_seq_len": longest_decode,
            "max_decode_query_len": max(max_decode_query_len, 1),
            "use_cuda_graph": padded,
            "num_actual_reqs": num_actual_reqs,
            "num_actual_tokens": num_tokens,
        }
        return named_counts(counts, captured_query_len, most if capturing else 0)
