"""The order of rows in a step: decodes, prefills, rest."""

import numpy as np

from attncore.kernels.codes import DECODE, PREFILL, REST
from attncore.kernels.numba.jit import entry_point, jit


@jit
def kind_of(query_len, decode_threshold):
    if query_len == 0:
        return REST
    return DECODE if query_len <= decode_threshold else PREFILL


@entry_point("UniTuple(int64, 2)(int32[::1], int64, int64, int8[::1])")
def mark_kinds(query_lens, n, decode_threshold, kinds):
    num_decodes = num_prefills = 0
    for i in range(n):
        kinds[i] = kind_of(query_lens[i], decode_threshold)
        num_decodes += kinds[i] == DECODE
        num_prefills += kinds[i] == PREFILL
    return num_decodes, num_prefills


@jit
def count_ones(query_lens, num_decodes):
    count = 0
    while count < num_decodes and query_lens[count] == 1:
        count += 1
    return count


@jit
def exchange(kinds, i, j, swaps, count):
    kinds[i], kinds[j] = kinds[j], kinds[i]
    swaps[count, 0], swaps[count, 1] = i, j
    return count + 1


@entry_point("int64(int8[::1], int64, int64, int64, int32[:, ::1])")
def plan_swaps(kinds, n, first, second, swaps):
    # The comments of arrange.pxi say why these are the fewest.
    bounds = np.array([0, first, first + second, n])
    count = 0
    for a in range(2):
        for b in range(a + 1, 3):
            j = bounds[b]
            for i in range(bounds[a], bounds[a + 1]):
                if kinds[i] != b:
                    continue
                while j < bounds[b + 1] and kinds[j] != a:
                    j += 1
                if j == bounds[b + 1]:
                    break
                count = exchange(kinds, i, j, swaps, count)
    j = k = -1
    for i in range(bounds[1]):
        b = kinds[i]
        if b == 0:
            continue
        c = 3 - b
        j = bounds[b] if j < 0 else j
        while kinds[j] != c:
            j += 1
        k = bounds[c] if k < 0 else k
        while kinds[k] != 0:
            k += 1
        count = exchange(kinds, i, j, swaps, count)
        count = exchange(kinds, i, k, swaps, count)
    return count
