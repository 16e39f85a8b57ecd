"""Checks before a step, which change nothing but cached blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.arguments import INT32_MAX
from attncore.kernels.codes import (
    CACHED_COLUMN,
    COMPUTED,
    ENCODER_DONE,
    ENCODER_LENS,
    ENCODER_NOT_CAPTURED,
    NULL_BLOCK,
    NUM_BLOCKS,
    OK,
    QUERY_NOT_CAPTURED,
    TOO_FEW_BLOCKS,
    TOO_LONG,
    TOO_MANY_ENCODER_TOKENS,
    TOO_MANY_ROWS,
    TOO_MANY_SEQ_TOKENS,
    TOO_MANY_TOKENS,
)
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.block_table import TableState, cache_stale_blocks
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.slots import column_of
from attncore.kernels.numba.step_shape import StepShape


@jit
def longest_of(lengths, count):
    longest = 0
    for i in range(count):
        longest = max(longest, lengths[i])
    return longest


@jit
def sum_of(lengths, count):
    total = 0
    for i in range(count):
        total += lengths[i]
    return total


@jit
def find_stale(computed, state, table, block_size, null_ids, count, stale):
    """How many rows have another block than the cached one for their next token, -1 where one has none."""
    num_stale = 0
    for i in range(count):
        stale[num_stale] = i
        num_stale += column_of(computed[i], block_size) != state[CACHED_COLUMN, i]
    for k in range(num_stale):
        i = stale[k]
        column = column_of(computed[i], block_size)
        if column >= state[NUM_BLOCKS, i] or table[i, column] < null_ids:
            return -1
    return num_stale


@jit
def most_padded(pads, shape_reqs, pad_seq_len, num_reqs):
    return INT32_MAX - ((shape_reqs - num_reqs) * pad_seq_len if pads else 0)


def decodes_fit(batch: BatchState, shape: StepShape, max_model_len: int) -> int:
    count, computed = batch.num_rows, batch.num_computed
    most = most_padded(shape.pads, shape.num_reqs, shape.pad_seq_len, count)
    for table in batch.decoders:
        table.num_stale = find_stale(
            computed, table.state, table.table, table.block_size, table.kernel_blocks, count, table.stale
        )
        if table.num_stale < 0:
            return -1
    longest = int(longest_of(computed, count))
    if longest >= max_model_len and count:
        return -1
    if count * max_model_len > most and sum_of(computed, count) + count > most:
        return -1
    if most < INT32_MAX and batch.cross is not None and sum_of(batch.state[ENCODER_LENS], count) > most:
        return -1
    for table in batch.decoders:
        if table.num_stale:
            cache_stale_blocks(computed, table.state, table.table, table.block_size, table.stale, table.num_stale)
    return longest


@jit
def check_blocks(state, table, block_size, null_ids, num_rows, starts, lens):
    """The first row of which tokens starts..starts + lens have no block of their own: (code, row, token)."""
    for i in range(num_rows):
        if lens[i] == 0:
            continue
        start, held = starts[i], state[NUM_BLOCKS, i]
        column, last = column_of(start, block_size), column_of(start + lens[i] - 1, block_size)
        if last >= held:
            return TOO_FEW_BLOCKS, i, max(held * block_size, start)
        if column == state[CACHED_COLUMN, i]:
            column += 1
        while column <= last:
            if table[i, column] < null_ids:
                return NULL_BLOCK, i, max(column * block_size, start)
            column += 1
    return OK, num_rows, 0


def check_rows(
    batch: BatchState, query_lens: Any, max_model_len: int, max_num_tokens: int, max_num_encoder_tokens: int
) -> tuple[int, int, int, int]:
    n, lens = batch.num_rows, query_lens[: batch.num_rows]
    computed = batch.num_computed[:n]
    too_long = np.flatnonzero(lens > max_model_len - computed)[:1].tolist()
    # The other checks are of the rows before it. A row that fails several ones answers with the first of them.
    num_rows = too_long[0] if too_long else n
    failures = [(row, -1, TOO_LONG, 0) for row in too_long]
    checked: list[tuple[TableState, Any, Any]] = [(table, computed, lens) for table in batch.decoders]
    num_encoder_tokens = num_encoder_seq_tokens = 0
    if batch.cross is not None:
        encoders = np.where(lens > 0, batch.state[ENCODER_LENS, :n], 0)
        fresh = np.where(batch.state[ENCODER_DONE, :n] != 0, 0, encoders)
        num_encoder_seq_tokens, num_encoder_tokens = int(sum_of(encoders, n)), int(sum_of(fresh, n))
        checked.append((batch.cross, np.zeros_like(fresh), fresh))
    for group, (table, starts, counts) in enumerate(checked):
        code, row, token = check_blocks(
            table.state, table.table, table.block_size, table.kernel_blocks, num_rows, starts, counts
        )
        if code != OK:
            failures.append((row, group, code, token))
    if failures:
        row, group, code, token = min(failures)
        return code, row, token, max(group, 0)
    num_tokens = int(sum_of(lens, n))
    if num_tokens > max_num_tokens:
        return TOO_MANY_TOKENS, 0, 0, 0
    num_seq_tokens = int(computed[lens > 0].sum(dtype=np.int64)) + num_tokens
    if num_seq_tokens > INT32_MAX or num_encoder_seq_tokens > INT32_MAX:
        return TOO_MANY_SEQ_TOKENS, 0, 0, 0
    if num_encoder_tokens > max_num_encoder_tokens:
        return TOO_MANY_ENCODER_TOKENS, 0, min(num_encoder_tokens, INT32_MAX), 0
    return OK, 0, 0, 0


@jit
def check_shape(state, query_lens, num_rows, has_cross, query_len, uniform, num_reqs, pad_seq_len):
    count = num_seq_tokens = num_encoder_seq_tokens = 0
    for i in range(num_rows):
        if query_lens[i] == 0:
            continue
        if query_lens[i] > query_len or (uniform and query_lens[i] != query_len):
            return QUERY_NOT_CAPTURED, i, 0
        if has_cross and state[ENCODER_LENS, i] and not state[ENCODER_DONE, i]:
            return ENCODER_NOT_CAPTURED, i, 0
        num_seq_tokens += state[COMPUTED, i] + query_lens[i]
        num_encoder_seq_tokens += state[ENCODER_LENS, i]
        count += 1
    if count > num_reqs:
        return TOO_MANY_ROWS, 0, count
    most = most_padded(True, num_reqs, pad_seq_len, count)
    return (OK if max(num_seq_tokens, num_encoder_seq_tokens) <= most else TOO_MANY_SEQ_TOKENS), 0, count
