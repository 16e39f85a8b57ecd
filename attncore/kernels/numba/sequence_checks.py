"""The list builder's checks of the sequences that it has read, and what it counts of them."""

from attncore.kernels.codes import (
    CONTEXT_WITHOUT_CHUNKS,
    HIT_ON_DECODE,
    HIT_WITH_WINDOW,
    OK,
    QUERY_TOO_LONG,
    TOO_FEW_BLOCKS,
)
from attncore.kernels.numba.jit import entry_point, jit

# Columns of an entry, which is one sequence. These are the fields of the C struct Entry.
SEQ_ID, FIRST_ID, NUM_IDS, QUERY_LEN, CONTEXT_LEN, KERNEL_LEN, ROW_START, ROW_COUNT, IS_PROMPT, HIT = range(10)
ENTRY_COLUMNS = 10


@jit
def capped_len(seq_len, window, block_size):
    return min(seq_len, ((window - 1) // block_size + 1) * block_size + seq_len % block_size)


@jit
def check_entry(entry, block_size, window, chunked_prefill, multi_token_decode):
    if entry[IS_PROMPT]:
        if entry[HIT] and window:
            return HIT_WITH_WINDOW
        if entry[CONTEXT_LEN] and not chunked_prefill and not entry[HIT]:
            return CONTEXT_WITHOUT_CHUNKS
    elif entry[HIT]:
        return HIT_ON_DECODE
    elif entry[QUERY_LEN] > 1 and not multi_token_decode:
        return QUERY_TOO_LONG
    if entry[NUM_IDS] >= 0 and (entry[CONTEXT_LEN] + entry[QUERY_LEN] - 1) // block_size >= entry[NUM_IDS]:
        return TOO_FEW_BLOCKS
    return OK


@jit
def first_missing(entry, block_size, window):
    token = max(entry[CONTEXT_LEN], entry[NUM_IDS] * block_size)
    if entry[IS_PROMPT] and window:
        token = max(token, entry[QUERY_LEN] - window)
    return token


@jit
def settle_entry(entry, block_size, window, keeps_prompts):
    seq_len = entry[CONTEXT_LEN] + entry[QUERY_LEN]
    needed = (seq_len - 1) // block_size + 1
    capped = window and not entry[IS_PROMPT]
    entry[KERNEL_LEN] = capped_len(seq_len, window, block_size) if capped else seq_len
    entry[ROW_START] = entry[ROW_COUNT] = 0
    if entry[NUM_IDS] < 0:
        return
    if capped:
        entry[ROW_COUNT] = min((window - 1) // block_size + 1 + (seq_len % block_size != 0), needed)
        entry[ROW_START] = needed - entry[ROW_COUNT]
    elif not entry[IS_PROMPT] or keeps_prompts:
        entry[ROW_COUNT] = entry[NUM_IDS]


@entry_point("UniTuple(int64, 3)(int64[:, ::1], int64, int64, boolean, boolean, boolean)")
def settle_entries(entries, block_size, window, chunked_prefill, hit_anywhere, multi_token_decode):
    """(code, row, token); row and token belong to a code that is not OK."""
    keeps_prompts = chunked_prefill
    for entry in entries:
        if hit_anywhere and entry[HIT]:
            keeps_prompts = True
    for i in range(len(entries)):
        entry = entries[i]
        code = check_entry(entry, block_size, window, chunked_prefill, multi_token_decode)
        if code != OK:
            return code, i, (first_missing(entry, block_size, window) if code == TOO_FEW_BLOCKS else 0)
        settle_entry(entry, block_size, window, keeps_prompts or entry[HIT] != 0)
    return OK, 0, 0


@entry_point("UniTuple(int64, 11)(int64[:, ::1], int64)")
def count_entries(entries, block_size):
    """Sums and maxima of settled sequences, in the order of GroupReader.measure."""
    num_tokens = num_seq_tokens = num_prefills = num_prefill_tokens = width = pages = 0
    max_query_len = max_prefill_seq_len = max_decode_seq_len = longest = 0
    max_decode_query_len = 1
    for entry in entries:
        query_len = entry[QUERY_LEN]
        seq_len = entry[CONTEXT_LEN] + query_len
        if entry[IS_PROMPT]:
            num_prefills += 1
            num_prefill_tokens += query_len
            max_prefill_seq_len = max(max_prefill_seq_len, seq_len)
        else:
            max_decode_seq_len = max(max_decode_seq_len, entry[KERNEL_LEN])
            max_decode_query_len = max(max_decode_query_len, query_len)
        if entry[NUM_IDS] >= 0:
            pages += (seq_len - 1) // block_size + 1
        width = max(width, entry[ROW_COUNT])
        longest = max(longest, entry[KERNEL_LEN])
        max_query_len = max(max_query_len, query_len)
        num_tokens += query_len
        num_seq_tokens += entry[KERNEL_LEN]
    return (
        num_tokens, num_seq_tokens, num_prefills, num_prefill_tokens, width, pages, max_query_len, max_prefill_seq_len,
        max_decode_seq_len, max_decode_query_len, longest,
    )  # fmt: skip
