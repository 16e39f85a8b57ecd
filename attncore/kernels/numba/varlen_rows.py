"""The rows of a step that run any number of tokens: decodes of several, and prefills."""

from __future__ import annotations

from typing import Any

from attncore.kernels.codes import CACHED_COLUMN
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.block_table import cache_block
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.slots import column_of, count_up, fill_slots, repeat
from attncore.kernels.numba.step_arena import StepArena


@jit
def fill_blocks(
    state, table, block_size, shares_pages, start, stop, computed, query_lens, num_pages, slots, indptr, last_page_len
):  # fmt: skip
    """Fills one group's arrays of rows start..stop: how many pages the group then has."""
    token = start
    for i in range(start, stop):
        seq_len = computed[i] + query_lens[i]
        fill_slots(slots[token:], table[i], computed[i], seq_len, block_size)
        token += query_lens[i]
        cache_block(state, table, i, column_of(seq_len - 1, block_size))
        if not shares_pages:
            num_pages += state[CACHED_COLUMN, i] + 1
            indptr[i + 1] = num_pages
            last_page_len[i] = seq_len - state[CACHED_COLUMN, i] * block_size
    return num_pages


@jit
def fill_fields(
    start, stop, num_decodes, seq_start, computed, lens, positions, token_to_req_indices, query_lens, context_lens,
    seq_lens, query_start_loc, seq_start_loc, logits_indices,
):  # fmt: skip
    """Fills the arrays that all groups share, of rows start..stop.

    Returns how many tokens the step has, query and sequence, then those of its decodes, then the largest query and
    sequence lengths of decodes and of prefills.
    """
    token, decode_tokens, decode_seqs = start, start, seq_start
    decode_query = decode_seq = prefill_query = prefill_seq = 0
    for i in range(start, stop):
        query_len, seq_len = lens[i], computed[i] + lens[i]
        count_up(positions[token:], computed[i], query_len)
        repeat(token_to_req_indices[token:], i, query_len)
        token += query_len
        seq_start += seq_len
        query_lens[i], context_lens[i], seq_lens[i] = query_len, computed[i], seq_len
        query_start_loc[i + 1], seq_start_loc[i + 1], logits_indices[i] = token, seq_start, token - 1
        if i < num_decodes:
            decode_tokens, decode_seqs = token, seq_start
            decode_query, decode_seq = max(decode_query, query_len), max(decode_seq, seq_len)
        else:
            prefill_query, prefill_seq = max(prefill_query, query_len), max(prefill_seq, seq_len)
    return token, seq_start, decode_tokens, decode_seqs, decode_query, decode_seq, prefill_query, prefill_seq


@jit
def rebase_prefills(
    query_start_loc, seq_start_loc, num_decodes, stop, decode_tokens, decode_seqs, prefill_query_start_loc,
    prefill_seq_start_loc,
):  # fmt: skip
    prefill_query_start_loc[0] = prefill_seq_start_loc[0] = 0
    for i in range(num_decodes, stop):
        prefill_query_start_loc[i - num_decodes + 1] = query_start_loc[i + 1] - decode_tokens
        prefill_seq_start_loc[i - num_decodes + 1] = seq_start_loc[i + 1] - decode_seqs


def fill_rows(out: StepArena, batch: BatchState, start: int, num_decodes: int, stop: int, query_lens: Any) -> None:
    computed = batch.num_computed
    out.counting = min(out.counting, start)
    for fields, table in zip(out.groups, batch.decoders, strict=False):  # the cross group is the last of out.groups
        fields.num_pages = fill_blocks(
            table.state, table.table, table.block_size, fields.shares_pages, start, stop, computed, query_lens,
            fields.num_pages, fields.slot_mapping, fields.paged_kv_indptr, fields.paged_kv_last_page_len,
        )  # fmt: skip
    token, seq_start, decode_tokens, decode_seqs, decode_query, decode_seq, prefill_query, prefill_seq = fill_fields(
        start, stop, num_decodes, out.num_seq_tokens, computed, query_lens, out.positions, out.token_to_req_indices,
        out.query_lens, out.context_lens, out.seq_lens, out.query_start_loc, out.seq_start_loc, out.logits_indices,
    )  # fmt: skip
    out.max_decode_query_len = max(out.max_decode_query_len, decode_query)
    out.max_decode_seq_len = max(out.max_decode_seq_len, decode_seq)
    out.max_prefill_query_len = max(out.max_prefill_query_len, prefill_query)
    out.max_prefill_seq_len = max(out.max_prefill_seq_len, prefill_seq)
    rebase_prefills(
        out.query_start_loc, out.seq_start_loc, num_decodes, stop, decode_tokens, decode_seqs,
        out.prefill_query_start_loc, out.prefill_seq_start_loc,
    )  # fmt: skip
    out.num_decode_tokens, out.num_tokens, out.num_seq_tokens = decode_tokens, token, seq_start
