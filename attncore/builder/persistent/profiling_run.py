"""Metadata of a profiling run, before the cache exists: prompts without blocks, to measure a model's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from attncore import arguments
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.read_only import read_only
from attncore.builder.slices import HostArrays
from attncore.kernels import host_functions
from attncore.kernels.codes import PAD_SLOT_ID


def profile_metadata(query_lens: Sequence[int], backends: Sequence[Any]) -> CommonAttentionMetadata:
    """Metadata of prompts of ``query_lens`` tokens with slots of -1, empty tables and page lists, which each of
    ``backends`` plans; NumPy arrays without one.

    ``query_lens`` are ints of at least 1, whose sum fits int32. The metadata is marked ``from_groups``, since backends
    handle a prompt without a table by the list builder's rules.
    """
    lens = np.array(query_lens, np.int32)
    if not len(lens):
        raise ValueError("query_lens: empty; a profiling run needs at least one request")
    none = np.zeros(len(lens), np.int32)
    starts = host_functions.build_query_start_loc(lens)
    positions, rows = host_functions.build_positions(none, lens)
    host = HostArrays(
        slot_mapping=np.full(len(positions), PAD_SLOT_ID, np.int64),
        positions=positions,
        token_to_req_indices=rows,
        seq_lens=lens,
        context_lens=none,
        query_lens=lens.copy(),
        logits_indices=host_functions.build_logits_indices(starts),
        query_start_loc=starts,
        seq_start_loc=starts.copy(),
        block_table=np.zeros((len(lens), 0), np.int32),
        paged_kv_indptr=np.zeros(len(lens) + 1, np.int32),
        paged_kv_indices=np.zeros(0, np.int32),
        paged_kv_last_page_len=none.copy(),
    )
    longest, num_tokens = int(lens.max()), len(positions)
    metadata = CommonAttentionMetadata(
        host,
        backends[0].from_host if backends else read_only,
        num_reqs=len(lens),
        num_tokens=num_tokens,
        num_prefills=len(lens),
        num_prefill_tokens=num_tokens,
        num_decodes=0,
        num_decode_tokens=0,
        max_query_len=longest,
        max_seq_len=longest,
        max_prefill_seq_len=longest,
        max_decode_seq_len=0,
        max_decode_query_len=1,
        use_cuda_graph=False,
        from_groups=True,
    )
    for backend in backends:
        if backend.has_plan:  # no two groups share a backend that plans
            backend.plan(metadata)
    return metadata


def profiled_lengths(query_lens: Iterable[int], max_num_reqs: int, max_num_tokens: int) -> list[int]:
    """The tokens of each request of a profiling run; ValueError or TypeError beyond the builder's capacity."""
    given = arguments.items("query_lens", query_lens, most=max_num_reqs + 1)
    lens = [arguments.integer(f"query_lens[{row}]", length, 1) for row, length in enumerate(given)]
    if len(lens) > max_num_reqs:
        raise ValueError(f"query_lens: {len(lens)} requests exceed max_num_reqs {max_num_reqs}")
    if sum(lens) > max_num_tokens:
        raise ValueError(f"query_lens: {sum(lens)} tokens exceed max_num_batched_tokens {max_num_tokens}")
    return lens
