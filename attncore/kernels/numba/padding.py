"""Pads a step's rows and tokens up to a captured size."""

from __future__ import annotations

import numpy as np

from attncore.kernels.codes import PAD_SLOT_ID
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.step_arena import GroupFields, StepArena
from attncore.kernels.numba.step_shape import StepShape


def pad_rows(out: StepArena, shape: StepShape) -> None:
    n, stop = out.num_reqs, shape.num_reqs
    out.seq_lens[n:stop] = shape.pad_seq_len
    out.context_lens[n:stop] = out.query_lens[n:stop] = out.logits_indices[n:stop] = 0
    out.query_start_loc[n + 1 : stop + 1] = out.num_tokens
    padded = np.arange(1, stop - n + 1) * shape.pad_seq_len
    out.seq_start_loc[n + 1 : stop + 1] = out.seq_start_loc[n] + padded


def pad_encoder(out: StepArena, shape: StepShape) -> None:
    n, stop = out.num_reqs, shape.num_reqs
    out.encoder_seq_lens[n:stop] = shape.pad_seq_len
    out.encoder_query_lens[n:stop] = 0
    padded = np.arange(1, stop - n + 1) * shape.pad_seq_len
    out.encoder_seq_start_loc[n + 1 : stop + 1] = out.encoder_seq_start_loc[n] + padded
    out.encoder_query_start_loc[n + 1 : stop + 1] = out.encoder_query_start_loc[n]
    if n < stop:
        out.max_encoder_seq_len = max(out.max_encoder_seq_len, shape.pad_seq_len)


def pad_pages(out: StepArena, group: GroupFields, shape: StepShape) -> None:
    group.paged_kv_indptr[out.num_reqs + 1 : shape.num_reqs + 1] = group.num_pages
    group.paged_kv_last_page_len[out.num_reqs : shape.num_reqs] = 0


def pad_tokens(out: StepArena, num_decoders: int, shape: StepShape) -> None:
    start, stop = out.num_tokens, shape.num_tokens
    for group in out.groups[:num_decoders]:
        group.slot_mapping[start:stop] = PAD_SLOT_ID
    out.positions[start:stop] = 0
    out.token_to_req_indices[start:stop] = shape.num_reqs - 1


def pad_step(out: StepArena, batch: BatchState, shape: StepShape) -> None:
    has_padded_rows = out.num_reqs < shape.num_reqs
    out.counting = min(out.counting, out.num_reqs)
    pad_rows(out, shape)
    if batch.cross is not None:
        pad_encoder(out, shape)
    for group in out.groups:
        if not group.shares_pages:
            pad_pages(out, group, shape)
    pad_tokens(out, len(batch.decoders), shape)
    out.num_reqs, out.num_tokens, out.num_decode_tokens = shape.num_reqs, shape.num_tokens, shape.num_tokens
    out.max_decode_query_len = shape.query_len
    out.max_decode_seq_len = max(out.max_decode_seq_len, shape.pad_seq_len if has_padded_rows else 0)
