"""The rows of a step that run one token each."""

from attncore.kernels.numba.block_table import TABLE_VIEW
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.memory import lengths_at, longs_at, struct_at
from attncore.kernels.numba.slots import offset_of
from attncore.kernels.numba.step_arena import group_at


@jit
def sum_up(values, sums, count):
    total = 0
    for i in range(count):
        total += values[i] + 1
        sums[i + 1] = total
    return total


@jit
def fill_decode_lengths(computed, context_lens, seq_lens, count):
    for i in range(count):
        context_lens[i] = computed[i]
        seq_lens[i] = computed[i] + 1


@jit
def fill_decode_slots(block, last_page_len, slots, block_size, count):
    for i in range(count):
        slots[i] = block[i] * block_size + last_page_len[i] - 1


@jit
def fill_decode_pages(computed, last_page_len, block_size, shift, count):
    if shift >= 0:
        mask = block_size - 1
        for i in range(count):
            last_page_len[i] = (computed[i] & mask) + 1
    else:
        for i in range(count):
            last_page_len[i] = offset_of(computed[i], block_size) + 1


@jit
def fill_decode_blocks(out, view, count):
    last_page_len = lengths_at(out.paged_kv_last_page_len)
    if not out.shares_pages:
        fill_decode_pages(lengths_at(view.num_computed), last_page_len, view.tokens, view.shift, count)
        out.num_pages = sum_up(lengths_at(view.column), lengths_at(out.paged_kv_indptr), count)
    fill_decode_slots(lengths_at(view.block), last_page_len, longs_at(out.slot_mapping), view.tokens, count)


@jit
def fill_decodes(out, batch, count, longest):
    computed, positions = lengths_at(batch.num_computed), longs_at(out.positions)
    fill_decode_lengths(computed, lengths_at(out.context_lens), lengths_at(out.seq_lens), count)
    for g in range(batch.num_decoders):
        fill_decode_blocks(group_at(out, g), struct_at(longs_at(batch.decoders)[g], TABLE_VIEW), count)
    for i in range(count):
        positions[i] = computed[i]
    out.num_seq_tokens = sum_up(computed, lengths_at(out.seq_start_loc), count)
    for i in range(count):
        computed[i] += 1
    out.max_decode_seq_len = longest + 1 if count else 0
    out.num_tokens = count


@jit
def start_counting(out, count):
    query_start_loc, logits_indices = lengths_at(out.query_start_loc), lengths_at(out.logits_indices)
    token_to_req_indices, query_lens = lengths_at(out.token_to_req_indices), lengths_at(out.query_lens)
    for i in range(out.counting, count):
        query_start_loc[i + 1], logits_indices[i], token_to_req_indices[i], query_lens[i] = i + 1, i, i, 1
    out.counting = max(out.counting, count)
