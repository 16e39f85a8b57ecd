"""Slots of tokens: the column and the slot of a token in blocks of a size."""

import numpy as np

from attncore.kernels.numba.jit import jit


@jit
def column_of(token, block_size):
    return token // block_size


@jit
def offset_of(token, block_size):
    return token % block_size


@jit
def fill_slots(slots, ids, start, stop, block_size):
    for token in range(start, stop):
        block = np.int64(ids[column_of(token, block_size)])
        slots[token - start] = block * block_size + offset_of(token, block_size)


@jit
def count_up(out, first, count):
    for k in range(count):
        out[k] = first + k


@jit
def repeat(out, value, count):
    for k in range(count):
        out[k] = value
