"""The rows of a step that run any number of tokens: decodes of several, and prefills."""

from attncore.kernels.numba.block_table import TABLE_VIEW, cache_block
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.memory import LENGTH, SLOT, lengths_at, longs_at, struct_at, wide
from attncore.kernels.numba.slots import column_of, count_up, fill_slots, repeat
from attncore.kernels.numba.step_arena import group_at


@jit
def fill_blocks(out, view, i, token, computed, seq_len):
    ids = lengths_at(view.table + i * view.width * LENGTH)
    fill_slots(longs_at(out.slot_mapping + token * SLOT), ids, computed, seq_len, view.tokens)
    cache_block(view, i, column_of(seq_len - 1, view.tokens))
    if not out.shares_pages:
        column = wide(lengths_at(view.column)[i])
        out.num_pages += column + 1
        lengths_at(out.paged_kv_indptr)[i + 1] = out.num_pages
        lengths_at(out.paged_kv_last_page_len)[i] = seq_len - column * view.tokens


@jit
def fill_fields(out, i, token, seq_start, computed, query_len):
    seq_len = computed + query_len
    count_up(longs_at(out.positions + token * SLOT), computed, query_len)
    repeat(lengths_at(out.token_to_req_indices + token * LENGTH), i, query_len)
    lengths_at(out.query_lens)[i] = query_len
    lengths_at(out.context_lens)[i] = computed
    lengths_at(out.seq_lens)[i] = seq_len
    lengths_at(out.query_start_loc)[i + 1] = token + query_len
    lengths_at(out.seq_start_loc)[i + 1] = seq_start + seq_len
    lengths_at(out.logits_indices)[i] = token + query_len - 1


@jit
def rebase_prefills(out, num_decodes, stop, decode_tokens, decode_seqs):
    query_starts, seq_starts = lengths_at(out.query_start_loc), lengths_at(out.seq_start_loc)
    prefill_queries, prefill_seqs = lengths_at(out.prefill_query_start_loc), lengths_at(out.prefill_seq_start_loc)
    prefill_queries[0] = prefill_seqs[0] = 0
    for i in range(num_decodes, stop):
        prefill_queries[i - num_decodes + 1] = query_starts[i + 1] - decode_tokens
        prefill_seqs[i - num_decodes + 1] = seq_starts[i + 1] - decode_seqs


@jit
def fill_rows(out, batch, start, num_decodes, stop, query_lens):
    token, seq_start = start, out.num_seq_tokens
    decode_tokens, decode_seqs = token, seq_start
    num_computed = lengths_at(batch.num_computed)
    out.counting = min(out.counting, start)
    for i in range(start, stop):
        query_len, computed = wide(query_lens[i]), wide(num_computed[i])
        seq_len = computed + query_len
        for g in range(batch.num_decoders):
            view = struct_at(longs_at(batch.decoders)[g], TABLE_VIEW)
            fill_blocks(group_at(out, g), view, i, token, computed, seq_len)
        fill_fields(out, i, token, seq_start, computed, query_len)
        num_computed[i] = seq_len
        token += query_len
        seq_start += seq_len
        if i < num_decodes:
            decode_tokens, decode_seqs = token, seq_start
            out.max_decode_query_len = max(out.max_decode_query_len, query_len)
            out.max_decode_seq_len = max(out.max_decode_seq_len, seq_len)
        else:
            out.max_prefill_query_len = max(out.max_prefill_query_len, query_len)
            out.max_prefill_seq_len = max(out.max_prefill_seq_len, seq_len)
    rebase_prefills(out, num_decodes, stop, decode_tokens, decode_seqs)
    out.num_decode_tokens, out.num_tokens, out.num_seq_tokens = decode_tokens, token, seq_start
