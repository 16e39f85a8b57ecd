# Slots of tokens: the column and the slot of a token in blocks of a size.

cdef struct BlockSize:
    length_t tokens
    int shift               # log2(tokens), -1 where it is no power of two


cdef BlockSize block_size_of(length_t tokens) noexcept nogil:
    cdef BlockSize block
    block.tokens = tokens
    block.shift = -1
    if tokens & (tokens - 1) == 0:
        block.shift = 0
        while (1 << block.shift) < tokens:
            block.shift += 1
    return block


cdef inline length_t column_of(length_t token, BlockSize block) noexcept nogil:
    return token >> block.shift if block.shift >= 0 else token // block.tokens


cdef inline length_t offset_of(length_t token, BlockSize block) noexcept nogil:
    return token & (block.tokens - 1) if block.shift >= 0 else token % block.tokens


cdef inline void fill_slots(slot_t* slots, const block_id_t* ids, length_t start, length_t stop,
                            BlockSize block) noexcept nogil:
    """Slots of tokens start..stop of one request, a run of consecutive slots a block."""
    cdef length_t token = start, run, k
    cdef slot_t first
    while token < stop:
        run = block.tokens - offset_of(token, block)
        if run > stop - token:
            run = stop - token
        first = <slot_t> ids[column_of(token, block)] * block.tokens + offset_of(token, block)
        for k in range(run):
            slots[k] = first + k
        slots += run
        token += run


cdef inline void count_up(slot_t* out, slot_t first, length_t count) noexcept nogil:
    cdef length_t k
    for k in range(count):
        out[k] = first + k


cdef inline void repeat(length_t* out, length_t value, length_t count) noexcept nogil:
    cdef length_t k
    for k in range(count):
        out[k] = value
