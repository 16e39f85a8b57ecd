"""Checks before a step, which change nothing but cached blocks."""

import numpy as np

from attncore.arguments import INT32_MAX
from attncore.kernels.codes import (
    BEYOND_SIZE,
    ENCODER_NOT_CAPTURED,
    NULL_BLOCK,
    OK,
    QUERY_NOT_CAPTURED,
    TOO_FEW_BLOCKS,
    TOO_LONG,
    TOO_MANY_ENCODER_TOKENS,
    TOO_MANY_ROWS,
    TOO_MANY_SEQ_TOKENS,
    TOO_MANY_TOKENS,
)
from attncore.kernels.numba.batch import BATCH_VIEW
from attncore.kernels.numba.block_table import TABLE_VIEW, cache_stale_blocks
from attncore.kernels.numba.jit import entry_point, jit
from attncore.kernels.numba.memory import lengths_at, longs_at, struct_at, wide
from attncore.kernels.numba.slots import column_of
from attncore.kernels.numba.step_shape import SHAPE


@jit
def longest_of(lengths, count):
    longest = np.int32(0)
    for i in range(count):
        longest = max(longest, lengths[i])
    return wide(longest)


@jit
def sum_of(lengths, count):
    total = 0
    for i in range(count):
        total += lengths[i]
    return total


@jit
def find_stale(view, count):
    """Whether each row has a block for its next token; notes the rows whose cached block is another one."""
    computed, cached, stale = lengths_at(view.num_computed), lengths_at(view.column), lengths_at(view.stale)
    shift, num_stale = view.shift, 0
    if shift >= 0:
        for i in range(count):
            stale[num_stale] = i
            num_stale += (computed[i] >> shift) != cached[i]
    else:
        for i in range(count):
            stale[num_stale] = i
            num_stale += column_of(computed[i], view.tokens) != cached[i]
    view.num_stale = num_stale
    for k in range(num_stale):
        i = wide(stale[k])
        column = column_of(computed[i], view.tokens)
        if column >= lengths_at(view.num_blocks)[i]:
            return False
        if lengths_at(view.table)[i * view.width + column] < view.null_ids:
            return False
    return True


@jit
def most_padded(shape, num_reqs):
    return INT32_MAX - ((shape.num_reqs - num_reqs) * shape.pad_seq_len if shape.pads else 0)


@jit
def decodes_fit(batch, shape, max_model_len):
    count, computed = batch.num_rows, lengths_at(batch.num_computed)
    most = most_padded(shape, count)
    for g in range(batch.num_decoders):
        if not find_stale(struct_at(longs_at(batch.decoders)[g], TABLE_VIEW), count):
            return -1
    longest = longest_of(computed, count)
    if longest >= max_model_len and count:
        return -1
    if count * max_model_len > most and sum_of(computed, count) + count > most:
        return -1
    if most < INT32_MAX and batch.cross and sum_of(lengths_at(batch.encoder_lens), count) > most:
        return -1
    for g in range(batch.num_decoders):
        cache_stale_blocks(struct_at(longs_at(batch.decoders)[g], TABLE_VIEW))
    return longest


@jit
def check_blocks(view, i, start, stop):
    """Whether tokens start..stop of row i have blocks of their own: (code, token)."""
    column, last = column_of(start, view.tokens), column_of(stop - 1, view.tokens)
    if last >= lengths_at(view.num_blocks)[i]:
        return TOO_FEW_BLOCKS, max(lengths_at(view.num_blocks)[i] * view.tokens, start)
    if column == lengths_at(view.column)[i]:
        column += 1
    while column <= last:
        if lengths_at(view.table)[i * view.width + column] < view.null_ids:
            return NULL_BLOCK, max(column * view.tokens, start)
        column += 1
    return OK, start


@entry_point("UniTuple(int64, 4)(int64, int64, int64, int64, int64)")
def check_rows(batch_address, query_lens, max_model_len, max_num_tokens, max_num_encoder_tokens):
    """(code, row, token, group) of the first row that fails."""
    batch, lens = struct_at(batch_address, BATCH_VIEW), lengths_at(query_lens)
    num_tokens = num_seq_tokens = num_encoder_tokens = num_encoder_seq_tokens = 0
    for i in range(batch.num_rows):
        query_len, computed = wide(lens[i]), wide(lengths_at(batch.num_computed)[i])
        if query_len == 0:
            continue
        if query_len > max_model_len - computed:
            return TOO_LONG, i, 0, 0
        for g in range(batch.num_decoders):
            view = struct_at(longs_at(batch.decoders)[g], TABLE_VIEW)
            code, token = check_blocks(view, i, computed, computed + query_len)
            if code != OK:
                return code, i, token, g
        encoder_len = wide(lengths_at(batch.encoder_lens)[i]) if batch.cross else 0
        num_encoder_seq_tokens += encoder_len
        if encoder_len and not lengths_at(batch.encoder_done)[i]:
            num_encoder_tokens += encoder_len
            code, token = check_blocks(struct_at(batch.cross, TABLE_VIEW), i, 0, encoder_len)
            if code != OK:
                return code, i, token, batch.num_decoders
        num_tokens += query_len
        num_seq_tokens += computed + query_len
    if num_tokens > max_num_tokens:
        return TOO_MANY_TOKENS, 0, 0, 0
    if max(num_seq_tokens, num_encoder_seq_tokens) > INT32_MAX:
        return TOO_MANY_SEQ_TOKENS, 0, 0, 0
    if num_encoder_tokens > max_num_encoder_tokens:
        return TOO_MANY_ENCODER_TOKENS, 0, min(num_encoder_tokens, INT32_MAX), 0
    return OK, 0, 0, 0


@entry_point("UniTuple(int64, 3)(int64, int64, int64)")
def check_shape(batch_address, query_lens, shape_address):
    """(code, row, rows that run, or their tokens where it is these)."""
    batch, shape, lens = struct_at(batch_address, BATCH_VIEW), struct_at(shape_address, SHAPE), lengths_at(query_lens)
    count = num_tokens = num_seq_tokens = num_encoder_seq_tokens = 0
    for i in range(batch.num_rows):
        query_len = wide(lens[i])
        if query_len == 0:
            continue
        if query_len > shape.query_len or (shape.uniform and query_len != shape.query_len):
            return QUERY_NOT_CAPTURED, i, 0
        encoder_len = wide(lengths_at(batch.encoder_lens)[i])
        if batch.cross and encoder_len and not lengths_at(batch.encoder_done)[i]:
            return ENCODER_NOT_CAPTURED, i, 0
        num_tokens += query_len
        num_seq_tokens += lengths_at(batch.num_computed)[i] + query_len
        num_encoder_seq_tokens += encoder_len
        count += 1
    if count > shape.num_reqs:
        return TOO_MANY_ROWS, 0, count
    if num_tokens > shape.num_tokens:
        return BEYOND_SIZE, 0, num_tokens
    fits = max(num_seq_tokens, num_encoder_seq_tokens) <= most_padded(shape, count)
    return (OK if fits else TOO_MANY_SEQ_TOKENS), 0, count
