"""A function on host arrays for each of slot mapping, positions, block tables and page indices; the order of kinds."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.arguments import INT32_MAX
from attncore.kernels.codes import SPLIT_DECODE, SPLIT_EXTEND, SPLIT_PREFILL
from attncore.kernels.numba.arrange import plan_swaps
from attncore.kernels.numba.block_ids import read_ids, readable
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.slots import count_up, fill_slots, repeat


@jit
def fill_slot_mapping(block_table, context_lens, query_lens, block_size, out):
    token = 0
    for i in range(len(query_lens)):
        if query_lens[i]:
            fill_slots(out[token:], block_table[i], context_lens[i], context_lens[i] + query_lens[i], block_size)
            token += query_lens[i]


@jit
def fill_positions(context_lens, query_lens, positions, token_to_req_indices):
    token = 0
    for i in range(len(query_lens)):
        if query_lens[i]:
            count_up(positions[token:], context_lens[i], query_lens[i])
            repeat(token_to_req_indices[token:], i, query_lens[i])
            token += query_lens[i]


def fill_page_indices(block_table: Any, indptr: Any, out: Any) -> None:
    for i, (start, stop) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
        out[start:stop] = block_table[i, : stop - start]


def fill_block_table(rows: list[Any], out: Any) -> int:
    for i, row in enumerate(rows):
        ids = read_ids(readable(row), INT32_MAX + 1)
        if ids is None or len(ids) > out.shape[1]:
            return i
        out[i, : len(ids)] = ids
        out[i, len(ids) :] = 0
    return -1


def classify(
    query_lens: Any, context_lens: Any, decode_threshold: int, extend_threshold: int, kinds: Any, counts: Any
) -> None:
    kinds[:] = np.where(query_lens > decode_threshold, SPLIT_PREFILL, SPLIT_DECODE)
    if len(context_lens):
        kinds[(kinds == SPLIT_PREFILL) & (context_lens > 0) & (query_lens <= extend_threshold)] = SPLIT_EXTEND
    for kind in range(3):
        counts[kind] = (kinds == kind).sum()
        counts[3 + kind] = query_lens[kinds == kind].sum(dtype=np.int64)


def order_kinds(kinds: Any, swaps: Any) -> int:
    return int(plan_swaps(kinds, len(kinds), (kinds == 0).sum(), (kinds == 1).sum(), swaps))
