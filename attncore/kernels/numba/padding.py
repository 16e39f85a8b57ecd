"""Pads a step's rows and tokens up to a captured size."""

from attncore.kernels.codes import PAD_SLOT_ID
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.memory import lengths_at, longs_at
from attncore.kernels.numba.step_arena import group_at


@jit
def pad_rows(out, shape):
    seq_starts, query_starts = lengths_at(out.seq_start_loc), lengths_at(out.query_start_loc)
    for i in range(out.num_reqs, shape.num_reqs):
        lengths_at(out.seq_lens)[i] = shape.pad_seq_len
        lengths_at(out.context_lens)[i] = lengths_at(out.query_lens)[i] = lengths_at(out.logits_indices)[i] = 0
        query_starts[i + 1] = out.num_tokens
        seq_starts[i + 1] = seq_starts[i] + shape.pad_seq_len


@jit
def pad_encoder(out, shape):
    seq_starts, query_starts = lengths_at(out.encoder_seq_start_loc), lengths_at(out.encoder_query_start_loc)
    for i in range(out.num_reqs, shape.num_reqs):
        lengths_at(out.encoder_seq_lens)[i] = shape.pad_seq_len
        lengths_at(out.encoder_query_lens)[i] = 0
        seq_starts[i + 1] = seq_starts[i] + shape.pad_seq_len
        query_starts[i + 1] = query_starts[i]
        out.max_encoder_seq_len = max(out.max_encoder_seq_len, shape.pad_seq_len)


@jit
def pad_pages(out, group, shape):
    for i in range(out.num_reqs, shape.num_reqs):
        lengths_at(group.paged_kv_indptr)[i + 1] = group.num_pages
        lengths_at(group.paged_kv_last_page_len)[i] = 0


@jit
def pad_tokens(out, num_decoders, shape):
    for g in range(num_decoders):
        slots = longs_at(group_at(out, g).slot_mapping)
        for t in range(out.num_tokens, shape.num_tokens):
            slots[t] = PAD_SLOT_ID
    for t in range(out.num_tokens, shape.num_tokens):
        longs_at(out.positions)[t] = 0
        lengths_at(out.token_to_req_indices)[t] = shape.num_reqs - 1


@jit
def pad_step(out, batch, shape):
    has_padded_rows = out.num_reqs < shape.num_reqs
    out.counting = min(out.counting, out.num_reqs)
    pad_rows(out, shape)
    if batch.cross:
        pad_encoder(out, shape)
    for g in range(out.num_groups):
        if not group_at(out, g).shares_pages:
            pad_pages(out, group_at(out, g), shape)
    pad_tokens(out, batch.num_decoders, shape)
    out.num_reqs, out.num_tokens, out.num_decode_tokens = shape.num_reqs, shape.num_tokens, shape.num_tokens
    out.max_decode_query_len = shape.query_len
    out.max_decode_seq_len = max(out.max_decode_seq_len, out.max_prefill_seq_len)
    if has_padded_rows:
        out.max_decode_seq_len = max(out.max_decode_seq_len, shape.pad_seq_len)
    out.num_prefills = out.num_prefill_tokens = out.max_prefill_query_len = out.max_prefill_seq_len = 0
