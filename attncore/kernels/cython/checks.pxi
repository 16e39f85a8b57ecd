# Checks before a step, which change nothing but cached blocks.

cdef extern from "kernels/cython/stale_rows.h":
    length_t stale_rows "attncore_stale_rows"(const length_t* computed, const length_t* column, length_t count,
                                              int shift, length_t block, length_t* stale,
                                              length_t* num_stale) noexcept nogil


cdef struct Failure:
    length_t row
    length_t token
    length_t group


cdef inline length_t longest_of(const length_t* lengths, length_t count) noexcept nogil:
    cdef length_t i, longest = 0
    for i in range(count):
        longest = lengths[i] if lengths[i] > longest else longest
    return longest


cdef inline slot_t sum_of(const length_t* lengths, length_t count) noexcept nogil:
    cdef length_t i
    cdef slot_t total = 0
    for i in range(count):
        total += lengths[i]
    return total


cdef inline bint find_stale(TableView* view, length_t count) noexcept nogil:
    """Whether each of rows 0..count has a block for its next token; ``stale`` names those whose cached one is another.

    This is check_rows for the common case, without saying what is wrong. Followers are checked with the group that they
    follow.
    """
    cdef length_t i, k, column, start, num_stale = 0
    cdef const length_t* computed = view.num_computed
    cdef const length_t* cached = view.column
    cdef length_t* stale = view.stale
    cdef BlockSize size = view.size
    start = stale_rows(computed, cached, count, size.shift, size.tokens, stale, &num_stale)
    for i in range(start, count):
        stale[num_stale] = i
        num_stale += column_of(computed[i], size) != cached[i]
    view.num_stale = num_stale
    while view != NULL:
        for k in range(num_stale):
            i = stale[k]
            column = column_of(computed[i], size)
            if column >= view.num_blocks[i] or view.table[<slot_t> i * view.width + column] < view.null_ids:
                return False
        view = view.next
    return True


cdef inline slot_t most_padded(StepShape shape, length_t num_reqs) noexcept nogil:
    """How many keys ``num_reqs`` rows may have in all, so that the sum with the shape's padded rows fits int32."""
    cdef slot_t padded = 0
    if shape.pads:
        padded = <slot_t> (shape.num_reqs - num_reqs) * shape.pad_seq_len
    return MAX_INT32 - padded


cdef inline length_t decodes_fit(BatchState batch, StepShape shape, length_t max_model_len) noexcept nogil:
    """Whether every row can run one token: the tokens of the longest row before it, or -1 where some row cannot.

    The blocks of these tokens are cached, so that the filling loops need no table.
    """
    cdef length_t g, count = batch.num_rows, longest
    cdef slot_t most = most_padded(shape, count)
    for g in range(batch.num_decoders):
        if not batch.decoders[g].follows and not find_stale(batch.decoders[g], count):
            return -1
    longest = longest_of(batch.num_computed, count)
    if longest >= max_model_len and count:
        return -1
    # A sum can be too large only where the largest possible one is.
    if <slot_t> count * max_model_len > most and sum_of(batch.num_computed, count) + count > most:
        return -1
    if most < MAX_INT32 and batch.cross != NULL and sum_of(batch.encoder_lens, count) > most:
        return -1
    for g in range(batch.num_decoders):
        if not batch.decoders[g].follows:
            cache_stale_blocks(batch.decoders[g])
    return longest


cdef inline length_t check_blocks(const TableView* view, length_t i, length_t start, length_t stop,
                                  length_t* failed_token) noexcept nogil:
    """Whether tokens start..stop of row i have blocks of their own in this group: a code."""
    cdef BlockSize size = view.size
    cdef length_t first_missing, column = column_of(start, size), last = column_of(stop - 1, size)
    if last >= view.num_blocks[i]:
        first_missing = view.num_blocks[i] * size.tokens
        failed_token[0] = first_missing if first_missing > start else start
        return TOO_FEW_BLOCKS
    if column == view.column[i]:  # the cached block is never the null block
        column += 1
    while column <= last:
        if view.table[<slot_t> i * view.width + column] < view.null_ids:
            failed_token[0] = column * size.tokens if column * size.tokens > start else start
            return NULL_BLOCK
        column += 1
    return OK


cdef length_t check_rows(BatchState batch, const length_t* query_lens, length_t max_model_len, length_t max_num_tokens,
                         length_t max_num_encoder_tokens, Failure* failure) noexcept nogil:
    """Whether every scheduled token has a block of its own in every group: a code, and where it failed."""
    cdef length_t i, g, query_len, computed, code
    cdef slot_t num_tokens = 0, num_seq_tokens = 0, num_encoder_tokens = 0, num_encoder_seq_tokens = 0
    for i in range(batch.num_rows):
        query_len = query_lens[i]
        if query_len == 0:
            continue
        computed = batch.num_computed[i]
        failure.row = i
        failure.group = 0
        if query_len > max_model_len - computed:
            return TOO_LONG
        for g in range(batch.num_decoders):
            code = check_blocks(batch.decoders[g], i, computed, computed + query_len, &failure.token)
            if code != OK:
                failure.group = g
                return code
        if batch.cross != NULL and batch.encoder_lens[i]:
            num_encoder_seq_tokens += batch.encoder_lens[i]
            if not batch.encoder_done[i]:
                num_encoder_tokens += batch.encoder_lens[i]
                code = check_blocks(batch.cross, i, 0, batch.encoder_lens[i], &failure.token)
                if code != OK:
                    failure.group = batch.num_decoders
                    return code
        num_tokens += query_len
        num_seq_tokens += computed + query_len
    if num_tokens > max_num_tokens:
        return TOO_MANY_TOKENS
    if num_seq_tokens > MAX_INT32 or num_encoder_seq_tokens > MAX_INT32:
        return TOO_MANY_SEQ_TOKENS
    if num_encoder_tokens > max_num_encoder_tokens:
        failure.token = <length_t> min(num_encoder_tokens, <slot_t> MAX_INT32)
        return TOO_MANY_ENCODER_TOKENS
    return OK


cdef length_t check_shape(BatchState batch, const length_t* query_lens, StepShape shape,
                          Failure* failure) noexcept nogil:
    """Whether the checked step fits a shape that pads: a code.

    Where no row is at fault, ``failure.token`` is the number of rows that run, or of their tokens, where it is these.
    """
    cdef length_t i, query_len, count = 0
    cdef slot_t num_tokens = 0, num_seq_tokens = 0, num_encoder_seq_tokens = 0
    failure.row = failure.token = 0
    for i in range(batch.num_rows):
        query_len = query_lens[i]
        if query_len == 0:
            continue
        failure.row = i
        if query_len > shape.query_len or (shape.uniform and query_len != shape.query_len):
            return QUERY_NOT_CAPTURED
        if batch.cross != NULL and batch.encoder_lens[i] and not batch.encoder_done[i]:
            return ENCODER_NOT_CAPTURED
        num_tokens += query_len
        num_seq_tokens += batch.num_computed[i] + query_len
        num_encoder_seq_tokens += batch.encoder_lens[i]
        count += 1
    failure.row, failure.token = 0, count
    if count > shape.num_reqs:
        return TOO_MANY_ROWS
    if num_tokens > shape.num_tokens:
        failure.token = <length_t> num_tokens  # at most the builder's, which was checked before
        return BEYOND_SIZE
    return OK if max(num_seq_tokens, num_encoder_seq_tokens) <= most_padded(shape, count) else TOO_MANY_SEQ_TOKENS
