"""A function on host arrays for each of slot mapping, positions, block tables and page indices; the order of kinds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from attncore.arguments import INT32_MAX
from attncore.kernels.codes import SPLIT_DECODE, SPLIT_EXTEND, SPLIT_PREFILL
from attncore.kernels.numba.arrange import plan_swaps
from attncore.kernels.numba.block_ids import read_ids, readable
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.slots import count_up, fill_slots, repeat


@jit
def has_room(start, count, room):
    return start >= 0 and count >= 0 and start + count <= room


@jit
def fill_slot_mapping(block_table, context_lens, query_lens, block_size, out):
    token = 0
    if block_size < 1:
        return 0
    held = min(block_table.shape[1] * block_size, INT32_MAX)
    for i in range(len(query_lens)):
        count = int(query_lens[i])
        if count == 0:
            continue
        if i >= len(context_lens) or i >= len(block_table):
            return i
        start = int(context_lens[i])
        if not has_room(start, count, held) or not has_room(token, count, len(out)):
            return i
        fill_slots(out[token:], block_table[i], start, start + count, block_size)
        token += count
    return -1


@jit
def fill_positions(context_lens, query_lens, positions, token_to_req_indices):
    token, room = 0, min(len(positions), len(token_to_req_indices))
    for i in range(len(query_lens)):
        count = int(query_lens[i])
        if count == 0:
            continue
        if i >= len(context_lens) or not has_room(token, count, room):
            return i
        count_up(positions[token:], context_lens[i], count)
        repeat(token_to_req_indices[token:], i, count)
        token += count
    return -1


def check_columns(table: Any) -> None:
    if table.shape[1] > 1 and table.strides[1] != table.itemsize:
        raise ValueError("block_table: its rows are not contiguous; give a copy")


def fill_page_indices(block_table: Any, indptr: Any, out: Any) -> int:
    check_columns(block_table)
    indptr = indptr.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(indptr)):
        if start == stop:
            continue
        if i >= len(block_table) or stop - start > block_table.shape[1] or not has_room(start, stop - start, len(out)):
            return i
        out[start:stop] = block_table[i, : stop - start]
    return -1


def fill_block_table(rows: list[Any], out: Any) -> int:
    for i in range(len(out)):
        if i >= len(rows):  # reading a row may run the caller's code
            return i
        ids = read_ids(readable(rows[i]), INT32_MAX + 1)
        if ids is None or len(ids) > out.shape[1]:
            return i
        out[i, : len(ids)] = ids
        out[i, len(ids) :] = 0
    return -1


def classify(
    query_lens: Any, context_lens: Any, decode_threshold: int, extend_threshold: int, kinds: Any, counts: Any
) -> None:
    kinds[:] = np.where(query_lens > decode_threshold, SPLIT_PREFILL, SPLIT_DECODE)
    if 0 < len(query_lens) <= len(context_lens):
        kinds[(kinds == SPLIT_PREFILL) & (context_lens > 0) & (query_lens <= extend_threshold)] = SPLIT_EXTEND
    for kind in range(3):
        counts[kind] = (kinds == kind).sum()
        counts[3 + kind] = query_lens[kinds == kind].sum(dtype=np.int64)


def order_kinds(kinds: Any, swaps: Any) -> int:
    return int(plan_swaps(kinds, len(kinds), (kinds == 0).sum(), (kinds == 1).sum(), swaps))
