"""Encoder lengths of a step, and the cross group's arrays."""

from __future__ import annotations

from attncore.kernels.codes import ENCODER_DONE, ENCODER_LENS
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.slots import column_of, fill_slots, offset_of
from attncore.kernels.numba.step_arena import StepArena


@jit
def fill_encoder_fields(
    state, table, block_size, num_reqs, seq_lens, query_lens, seq_start_loc, query_start_loc, slots, indptr,
    last_page_len,
):  # fmt: skip
    """Fills the encoder arrays: (pages, the longest encoder, encoder tokens, those that run now)."""
    token = seq_start = longest = pages = 0
    for i in range(num_reqs):
        length = state[ENCODER_LENS, i]
        fresh = 0 if state[ENCODER_DONE, i] else length
        if fresh > len(slots) - token:
            fresh = 0
        if fresh:
            fill_slots(slots[token:], table[i], 0, length, block_size)
            token += fresh
        seq_start += length
        seq_lens[i], query_lens[i] = length, fresh
        seq_start_loc[i + 1], query_start_loc[i + 1] = seq_start, token
        longest = max(longest, length)
        last_page_len[i] = 0
        if length:
            pages += column_of(length - 1, block_size) + 1
            last_page_len[i] = offset_of(length - 1, block_size) + 1
        indptr[i + 1] = pages
    return pages, longest, seq_start, token


def fill_encoder(out: StepArena, batch: BatchState, num_reqs: int) -> None:
    cross, group = batch.cross, out.groups[-1]
    if cross is None or (
        out.version == batch.version and out.changes == batch.changes and out.encoder_reqs == num_reqs
    ):
        return
    group.num_pages, out.max_encoder_seq_len, out.num_encoder_tokens, out.num_cross_slots = fill_encoder_fields(
        batch.state, cross.table, cross.block_size, num_reqs, out.encoder_seq_lens, out.encoder_query_lens,
        out.encoder_seq_start_loc, out.encoder_query_start_loc, group.slot_mapping, group.paged_kv_indptr,
        group.paged_kv_last_page_len,
    )  # fmt: skip
    out.encoder_reqs = num_reqs
    # Encoders that ran are done: the next step in this arena writes their query lengths again.
    out.version = -1 if out.num_cross_slots else batch.version
