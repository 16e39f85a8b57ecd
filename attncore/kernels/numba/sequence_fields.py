"""The list builder's arrays, from the sequences that it has read."""

from attncore.kernels.codes import PAD_SLOT_ID
from attncore.kernels.numba.jit import entry_point, jit
from attncore.kernels.numba.memory import lengths_at
from attncore.kernels.numba.sequence_checks import (
    CONTEXT_LEN,
    FIRST_ID,
    IS_PROMPT,
    KERNEL_LEN,
    NUM_IDS,
    QUERY_LEN,
    ROW_COUNT,
    ROW_START,
)
from attncore.kernels.numba.slots import count_up, fill_slots, repeat

ENTRIES, IDS, SLOTS = "int64[:, ::1]", "int32[::1]", "int64[::1]"


@jit
def count_masked(entry, window):
    if entry[NUM_IDS] < 0:
        return entry[QUERY_LEN]
    if not window or not entry[IS_PROMPT]:
        return 0
    return min(max(entry[QUERY_LEN] - window - entry[CONTEXT_LEN], 0), entry[QUERY_LEN])


@jit
def fill_entry_tokens(entry, i, ids, block_size, window, slots, positions, token_to_req_indices):
    query_len, context_len = entry[QUERY_LEN], entry[CONTEXT_LEN]
    masked = count_masked(entry, window)
    for k in range(masked):
        slots[k] = PAD_SLOT_ID
    if masked < query_len:
        fill_slots(slots[masked:], ids[entry[FIRST_ID] :], context_len + masked, context_len + query_len, block_size)
    count_up(positions, context_len, query_len)
    repeat(token_to_req_indices, i, query_len)


@entry_point(f"void({ENTRIES}, {IDS}, int64, int64, {SLOTS}, {SLOTS}, {IDS}, {IDS}, {IDS}, {IDS}, {IDS}, {IDS}, {IDS})")
def fill_entries(
    entries, ids, block_size, window, slot_mapping, positions, token_to_req_indices, seq_lens, context_lens,
    query_lens, query_start_loc, seq_start_loc, logits_indices,
):  # fmt: skip
    token = seq_start = 0
    query_start_loc[0] = seq_start_loc[0] = 0
    for i in range(len(entries)):
        entry = entries[i]
        fill_entry_tokens(
            entry, i, ids, block_size, window, slot_mapping[token:], positions[token:], token_to_req_indices[token:]
        )
        token += entry[QUERY_LEN]
        seq_start += entry[KERNEL_LEN]
        seq_lens[i], context_lens[i], query_lens[i] = entry[KERNEL_LEN], entry[CONTEXT_LEN], entry[QUERY_LEN]
        query_start_loc[i + 1], seq_start_loc[i + 1], logits_indices[i] = token, seq_start, token - 1


@entry_point(f"void(int64, int64, {SLOTS}, {SLOTS}, {IDS}, {IDS}, {IDS}, {IDS})")
def pad_entries(
    n, pad, slot_mapping, positions, token_to_req_indices, seq_lens, query_start_loc, seq_start_loc
):  # fmt: skip
    token = query_start_loc[n]
    for i in range(pad):
        slot_mapping[token + i], positions[token + i], token_to_req_indices[token + i] = PAD_SLOT_ID, 0, n + i
        seq_lens[n + i] = 1
        seq_start_loc[n + i + 1] = seq_start_loc[n + i] + 1


@jit
def copy_lengths(out, given, count):
    for k in range(count):
        out[k] = given[k]


@entry_point(f"void({ENTRIES}, {IDS}, int64, int64, int64, int64)")
def fill_entry_rows(entries, ids, table, num_rows, width, stride):
    """``table`` is an address, ``stride`` the bytes from one of its rows to the next."""
    for i in range(num_rows):
        row, count = lengths_at(table + i * stride), 0
        if i < len(entries):
            count = min(entries[i, ROW_COUNT], width)
            copy_lengths(row, ids[entries[i, FIRST_ID] + entries[i, ROW_START] :], count)
        for k in range(count, width):
            row[k] = 0


@entry_point(f"void({ENTRIES}, {IDS}, int64, {IDS}, {IDS}, {IDS})")
def fill_entry_pages(entries, ids, block_size, indptr, indices, last_page_len):
    pages = 0
    indptr[0] = 0
    for i in range(len(last_page_len)):
        last_page_len[i] = 0
        if i < len(entries) and entries[i, NUM_IDS] >= 0:
            seq_len = entries[i, CONTEXT_LEN] + entries[i, QUERY_LEN]
            needed = (seq_len - 1) // block_size + 1
            copy_lengths(indices[pages:], ids[entries[i, FIRST_ID] :], needed)
            pages += needed
            last_page_len[i] = (seq_len - 1) % block_size + 1
        indptr[i + 1] = pages
