"""Slots of tokens: the column and the slot of a token in blocks of a size."""

import numpy as np

from attncore.kernels.numba.jit import jit

# Of loops over decodes, which take the shift of a power of two: numbers that are divided are not handled in vectors.


def shift_of(block_size: int) -> int:
    """log2(block_size), -1 where it is no power of two."""
    return block_size.bit_length() - 1 if block_size & (block_size - 1) == 0 else -1


@jit
def column_of(token, block_size):
    return token // block_size


@jit
def offset_of(token, block_size):
    return token % block_size


@jit
def fill_slots(slots, ids, start, stop, block_size):
    token, done = np.int64(start), 0
    while token < stop:
        column = column_of(token, block_size)
        run = min((column + 1) * block_size, stop) - token
        first = np.int64(ids[column]) * block_size + offset_of(token, block_size)
        for k in range(run):
            slots[done + k] = first + k
        done += run
        token += run


@jit
def count_up(out, first, count):
    for k in range(count):
        out[k] = first + k


@jit
def repeat(out, value, count):
    for k in range(count):
        out[k] = value
