"""The rows of a step that run one token each."""

from __future__ import annotations

import numpy as np

from attncore.kernels.codes import CACHED_BLOCK, CACHED_COLUMN
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.block_table import TableState
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.slots import offset_of
from attncore.kernels.numba.step_arena import GroupFields, StepArena


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
        slots[i] = np.int64(block[i]) * block_size + last_page_len[i] - 1


@jit
def fill_decode_pages(computed, last_page_len, block_size, count):
    for i in range(count):
        last_page_len[i] = offset_of(computed[i], block_size) + 1


def fill_decode_blocks(out: GroupFields, table: TableState, count: int) -> None:
    if not out.shares_pages:
        fill_decode_pages(table.num_computed, out.paged_kv_last_page_len, table.block_size, count)
        out.num_pages = sum_up(table.state[CACHED_COLUMN], out.paged_kv_indptr, count)
    fill_decode_slots(table.state[CACHED_BLOCK], out.paged_kv_last_page_len, out.slot_mapping, table.block_size, count)


def fill_decodes(out: StepArena, batch: BatchState, count: int, longest: int) -> None:
    computed = batch.num_computed
    fill_decode_lengths(computed, out.context_lens, out.seq_lens, count)
    for fields, table in zip(out.groups, batch.decoders, strict=False):  # the cross group is the last of out.groups
        fill_decode_blocks(fields, table, count)
    out.positions[:count] = computed[:count]
    out.num_seq_tokens = sum_up(computed, out.seq_start_loc, count)
    out.max_decode_seq_len = longest + 1 if count else 0
    out.num_tokens = count


def start_counting(out: StepArena, count: int) -> None:
    start = out.counting
    if count > start:
        indices = np.arange(start, count, dtype=np.int32)
        out.query_start_loc[start + 1 : count + 1] = indices + 1
        out.logits_indices[start:count] = out.token_to_req_indices[start:count] = indices
        out.query_lens[start:count] = 1
        out.counting = count
