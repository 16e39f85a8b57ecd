"""Encoder lengths of a step, and the cross group's arrays."""

from attncore.kernels.numba.block_table import TABLE_VIEW
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.memory import LENGTH, SLOT, lengths_at, longs_at, struct_at, wide
from attncore.kernels.numba.slots import column_of, fill_slots, offset_of
from attncore.kernels.numba.step_arena import group_at


@jit
def fill_encoder_fields(out, batch, num_reqs):
    token = seq_start = longest = pages = 0
    view, group = struct_at(batch.cross, TABLE_VIEW), group_at(out, batch.num_decoders)
    done = lengths_at(batch.encoder_done)
    for i in range(num_reqs):
        length = wide(lengths_at(batch.encoder_lens)[i])
        fresh = 0 if done[i] else length
        if fresh > out.max_cross_slots - token:
            fresh = 0
        if fresh:
            ids = lengths_at(view.table + i * view.width * LENGTH)
            fill_slots(longs_at(group.slot_mapping + token * SLOT), ids, 0, length, view.tokens)
            done[i] = 1
            token += fresh
        seq_start += length
        lengths_at(out.encoder_seq_lens)[i] = length
        lengths_at(out.encoder_query_lens)[i] = fresh
        lengths_at(out.encoder_seq_start_loc)[i + 1] = seq_start
        lengths_at(out.encoder_query_start_loc)[i + 1] = token
        longest = max(longest, length)
        lengths_at(group.paged_kv_last_page_len)[i] = 0
        if length:
            pages += column_of(length - 1, view.tokens) + 1
            lengths_at(group.paged_kv_last_page_len)[i] = offset_of(length - 1, view.tokens) + 1
        lengths_at(group.paged_kv_indptr)[i + 1] = pages
    group.num_pages, out.max_encoder_seq_len = pages, longest
    out.num_encoder_tokens, out.num_cross_slots = seq_start, token


@jit
def has_encoder(out, batch, num_reqs):
    """Whether neither rows nor their blocks have changed since this arena's last step."""
    return out.version == batch.version and out.changes == batch.changes and out.encoder_reqs == num_reqs


@jit
def fill_encoder(out, batch, num_reqs):
    if has_encoder(out, batch, num_reqs):
        return
    fill_encoder_fields(out, batch, num_reqs)
    out.encoder_reqs = num_reqs
    # Encoders that ran are done: the next step in this arena writes their query lengths again.
    out.version = -1 if out.num_cross_slots else batch.version
