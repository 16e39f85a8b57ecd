# The order of rows in a step: decodes, prefills, rest.

cdef inline signed char kind_of(length_t query_len, length_t decode_threshold) noexcept nogil:
    return REST if query_len == 0 else (DECODE if query_len <= decode_threshold else PREFILL)


cdef void mark_kinds(const length_t* query_lens, length_t n, length_t decode_threshold, signed char* kinds,
                     length_t* num_decodes, length_t* num_prefills) noexcept nogil:
    """The kind of each of n rows; how many of them are decodes and prefills."""
    cdef length_t i
    num_decodes[0] = num_prefills[0] = 0
    for i in range(n):
        kinds[i] = kind_of(query_lens[i], decode_threshold)
        num_decodes[0] += kinds[i] == DECODE
        num_prefills[0] += kinds[i] == PREFILL


cdef inline length_t count_ones(const length_t* query_lens, length_t num_decodes) noexcept nogil:
    """How many leading decodes run one token."""
    cdef length_t count = 0
    while count < num_decodes and query_lens[count] == 1:
        count += 1
    return count


cdef inline void exchange(signed char* kinds, length_t i, length_t j, length_t* swaps, length_t* count) noexcept nogil:
    """Exchanges two kinds and notes the swap."""
    cdef signed char kind = kinds[i]
    kinds[i] = kinds[j]
    kinds[j] = kind
    swaps[2 * count[0]] = i
    swaps[2 * count[0] + 1] = j
    count[0] += 1


cdef length_t plan_swaps(signed char* kinds, length_t n, length_t first, length_t second,
                         length_t* swaps) noexcept nogil:
    """The fewest swaps that bring kinds 0, 1, 2 into order; ``first`` rows are of kind 0, ``second`` of kind 1."""
    # Regions 0, 1, 2 hold kinds 0, 1, 2 at the end. A row in region a of kind b and one in b of kind a take one swap;
    # what is left then goes round three regions and takes two. No fewer will do.
    cdef length_t bounds[4]
    cdef length_t i, j, k, count = 0
    cdef signed char a, b, c
    bounds[0], bounds[1], bounds[2], bounds[3] = 0, first, first + second, n
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
                exchange(kinds, i, j, swaps, &count)
    j = k = -1  # what is left goes round one way only: both searches run on
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
        exchange(kinds, i, j, swaps, &count)
        exchange(kinds, i, k, swaps, &count)
    return count
