"""The compiled hot path: slots, lengths, prefix sums, tables and page lists of one step.

The persistent door has BatchState (the requests in flight) with a TableState for each KV-cache group (their blocks),
StepArena (the outputs of one step), StepShape (a size of step) and StepKernel (check, then one pass over the rows).
The list door has GroupReader (reads lists of block ids, checks, fills). Every buffer is acquired once, at construction.
The loops are ``noexcept nogil`` C, called with the GIL held: giving it up costs up to the switch interval when another
thread is busy.

Nothing here writes an error's text: a check answers with a code and the indices, a bad object with "bad", and the
Python side (builder/persistent/refusals.py) says what is wrong. _slots_numba.py is the twin, function by function.
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from attncore._typedefs cimport block_id_t, length_t, slot_t

cdef extern from *:
    """
    #include <stdint.h>
    /* One Python int (not a bool) to C: 1 read, 0 not an int, or not one of 64 bits, -1 interrupted (an exception that
       is no Exception is set). Block tables are long lists of small ints, so the interpreter's own layout is used where
       it is known; ATTNCORE_PUBLIC_C_API leaves it out. */
    #if defined(ATTNCORE_PUBLIC_C_API) || defined(PYPY_VERSION)
      #define ATTNCORE_READS_INTS "public C API"
    #else
      #define ATTNCORE_READS_INTS "interpreter layout"
    #endif
    static int attncore_not_read(void) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
        return 0;
    }
    static int attncore_read_any(PyObject *object, int64_t *value) {
        PyObject *index;
        if (PyBool_Check(object) || !PyIndex_Check(object)) return 0;
        index = PyNumber_Index(object);
        if (index == NULL) return attncore_not_read();
        *value = PyLong_AsLongLong(index);
        Py_DECREF(index);
        if (*value == -1 && PyErr_Occurred()) return attncore_not_read();
        return 1;
    }
    static inline int attncore_read_int(PyObject *object, int64_t *value) {
    #if !defined(ATTNCORE_PUBLIC_C_API) && !defined(PYPY_VERSION)
        if (Py_IS_TYPE(object, &PyLong_Type)) {
      #if PY_VERSION_HEX >= 0x030C0000
            if (PyUnstable_Long_IsCompact((PyLongObject *)object)) {
                *value = (int64_t)PyUnstable_Long_CompactValue((PyLongObject *)object);
                return 1;
            }
      #else
            Py_ssize_t size = Py_SIZE(object);
            if (size == 1) { *value = (int64_t)((PyLongObject *)object)->ob_digit[0]; return 1; }
            if (size == 0) { *value = 0; return 1; }
      #endif
        }
    #else
        if (PyLong_CheckExact(object)) {
            *value = PyLong_AsLongLong(object);
            if (*value == -1 && PyErr_Occurred()) return attncore_not_read();
            return 1;
        }
    #endif
        return attncore_read_any(object, value);
    }

    /* Two loops that the compiler does not find ways for by itself, four rows at a time. They answer how many rows they
       did; where there is no SSE2 (it is in every x86-64) that is none, and the plain loops behind them do all. */
    #if defined(__SSE2__)
      #include <emmintrin.h>
    #endif
    /* sums[i + 1] is the sum of values[0..i] + 1; total is the last. */
    static inline int32_t attncore_sum_fours(const int32_t *values, int32_t *sums, int32_t count, int32_t *total) {
        int32_t i = 0;
    #if defined(__SSE2__)
        __m128i carry = _mm_setzero_si128();
        for (; i + 4 <= count; i += 4) {
            __m128i four = _mm_loadu_si128((const __m128i *)(values + i));
            four = _mm_add_epi32(four, _mm_set1_epi32(1));
            four = _mm_add_epi32(four, _mm_slli_si128(four, 4));
            four = _mm_add_epi32(four, _mm_slli_si128(four, 8));
            four = _mm_add_epi32(four, carry);
            _mm_storeu_si128((__m128i *)(sums + i + 1), four);
            carry = _mm_shuffle_epi32(four, 0xFF);
        }
        *total = _mm_cvtsi128_si32(carry);
    #endif
        return i;
    }
    #if defined(__SSE2__)
    /* All ones in lanes whose token is in its cached column. shift < 0: no power of two, and no division either. */
    static inline __m128i attncore_in_column(const int32_t *computed, const int32_t *column, int shift,
                                             __m128i tokens) {
        __m128i token = _mm_loadu_si128((const __m128i *)computed), cached = _mm_loadu_si128((const __m128i *)column);
        __m128i even, odd, offset;
        if (shift >= 0) return _mm_cmpeq_epi32(_mm_sra_epi32(token, _mm_cvtsi32_si128(shift)), cached);
        even = _mm_mul_epu32(cached, tokens);
        odd = _mm_mul_epu32(_mm_srli_epi64(cached, 32), tokens);
        offset = _mm_sub_epi32(token, _mm_unpacklo_epi32(_mm_shuffle_epi32(even, 8), _mm_shuffle_epi32(odd, 8)));
        /* 0 <= offset < tokens: neither offset nor tokens - 1 - offset is negative. */
        tokens = _mm_sub_epi32(_mm_sub_epi32(tokens, _mm_set1_epi32(1)), offset);
        return _mm_cmpgt_epi32(_mm_or_si128(offset, tokens), _mm_set1_epi32(-1));
    }
    static const int32_t attncore_lanes[16][4] = {
        {0}, {0}, {1}, {0, 1}, {2}, {0, 2}, {1, 2}, {0, 1, 2}, {3}, {0, 3}, {1, 3}, {0, 1, 3}, {2, 3}, {0, 2, 3},
        {1, 2, 3}, {0, 1, 2, 3}};
    static const int32_t attncore_num_lanes[16] = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};
    #endif
    /* Rows whose token is not in their cached column, into stale (room for count); num_stale is how many. */
    static inline int32_t attncore_stale_fours(const int32_t *computed, const int32_t *column, int32_t count, int shift,
                                               int32_t block, int32_t *stale, int32_t *num_stale) {
        int32_t i = 0;
    #if defined(__SSE2__)
        const __m128i tokens = _mm_set1_epi32(block);
        int32_t k, n = 0, lanes;
        __m128i fresh[4];
        for (; i + 16 <= count; i += 16) {
            for (k = 0; k < 4; k++)
                fresh[k] = attncore_in_column(computed + i + 4 * k, column + i + 4 * k, shift, tokens);
            if (_mm_movemask_epi8(_mm_and_si128(_mm_and_si128(fresh[0], fresh[1]), _mm_and_si128(fresh[2], fresh[3])))
                == 0xFFFF) continue;
            for (k = 0; k < 4; k++) {  /* without a branch: which rows begin a block is anybody's guess */
                lanes = ~_mm_movemask_ps(_mm_castsi128_ps(fresh[k])) & 15;
                _mm_storeu_si128((__m128i *)(stale + n),
                                 _mm_add_epi32(_mm_set1_epi32(i + 4 * k),
                                               _mm_loadu_si128((const __m128i *)attncore_lanes[lanes])));
                n += attncore_num_lanes[lanes];
            }
        }
        *num_stale = n;
    #endif
        return i;
    }
    /* A word that the device looks at: stored after, and loaded before, everything else of a step. */
    #if defined(__GNUC__) || defined(__clang__)
    static inline void attncore_store(int64_t *word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
    static inline int64_t attncore_load(int64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    #else
    static inline void attncore_store(int64_t *word, int64_t value) { *(volatile int64_t *)word = value; }
    static inline int64_t attncore_load(int64_t *word) { return *(volatile int64_t *)word; }
    #endif
    """
    const char* ATTNCORE_READS_INTS
    int attncore_read_int(PyObject* item, slot_t* value) except -1
    void attncore_store(slot_t* word, slot_t value) noexcept nogil
    slot_t attncore_load(slot_t* word) noexcept nogil
    length_t attncore_sum_fours(const length_t* values, length_t* sums, length_t count, length_t* total) noexcept nogil
    length_t attncore_stale_fours(const length_t* computed, const length_t* column, length_t count, int shift,
                                  length_t block, length_t* stale, length_t* num_stale) noexcept nogil

IMPLEMENTATION = "cython"
READS_INTS = (<bytes> ATTNCORE_READS_INTS).decode()

cdef enum:
    MAX_INT32 = 0x7FFFFFFF

# What a check may answer: attncore/slots.py has the same list for Python.
cdef enum:
    OK = 0
    TOO_FEW_BLOCKS = 1
    NULL_BLOCK = 2
    TOO_LONG = 3
    TOO_MANY_TOKENS = 4
    TOO_MANY_SEQ_TOKENS = 5
    HIT_ON_DECODE = 6
    HIT_WITH_WINDOW = 7
    CONTEXT_WITHOUT_CHUNKS = 8
    QUERY_TOO_LONG = 9
    TOO_MANY_ENCODER_TOKENS = 10
    QUERY_NOT_CAPTURED = 11
    ENCODER_NOT_CAPTURED = 12
    TOO_MANY_ROWS = 13

cdef enum:
    DECODE = 0
    PREFILL = 1
    REST = 2


# ---- block arithmetic ------------------------------------------------------------------------------------------------

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


# ---- reading block ids -----------------------------------------------------------------------------------------------

cdef object readable(object ids):
    """What read_ids takes of a row: a list, or a one-dimensional int32 or int64 memoryview; None where it is no row."""
    if type(ids) is list:
        return ids
    if type(ids) is tuple:
        return list(ids)
    if not hasattr(ids, "__len__"):  # an iterator could be read only once, and then not be told about
        return None
    if PyObject_CheckBuffer(ids):
        try:
            view = memoryview(ids)
            if view.ndim == 1 and view.format in ("i", "l", "q") and view.c_contiguous:
                return view
        except (BufferError, TypeError, ValueError):
            pass
    try:
        return list(ids)
    except (TypeError, MemoryError, OverflowError):
        return None


cdef slot_t read_ids(object row, block_id_t* out, slot_t capacity, slot_t limit) except -3:
    """Block ids 0 <= id < limit of a ``readable`` row into out; the count, or -1: bad."""
    cdef slot_t k, value = 0, count
    cdef list items
    if row is None or len(row) > capacity:
        return -1
    count = len(row)
    if type(row) is not list:
        if count == 0:
            return 0
        return read_buffer(row, out, count, limit)
    items = row
    k = 0
    # The size is asked for each time: an item's __index__ may be the caller's own code.
    while k < PyList_GET_SIZE(items) and k < count:
        if attncore_read_int(<PyObject*> PyList_GET_ITEM(items, k), &value) == 0 or value < 0 or value >= limit:
            return -1
        out[k] = <block_id_t> value
        k += 1
    return k


cdef slot_t read_buffer(object view, block_id_t* out, slot_t count, slot_t limit) except -3:
    cdef Py_buffer buffer
    cdef slot_t k, value
    cdef bint bad = False
    PyObject_GetBuffer(view, &buffer, PyBUF_C_CONTIGUOUS)
    for k in range(count):
        value = (<const length_t*> buffer.buf)[k] if buffer.itemsize == 4 else (<const slot_t*> buffer.buf)[k]
        bad |= (value < 0) | (value >= limit)
        out[k] = <block_id_t> value
    PyBuffer_Release(&buffer)
    return -1 if bad else count


# ---- the persistent door ---------------------------------------------------------------------------------------------

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


cdef inline bint find_stale(Rows* rows, length_t count) noexcept nogil:
    """Whether each of rows 0..count has a block for its next token; ``stale`` names those whose cached one is another.

    check_rows for the common case, without saying what is wrong. Followers are looked at with the group they follow.
    """
    cdef length_t i, k, column, start, num_stale = 0
    cdef const length_t* computed = rows.num_computed
    cdef const length_t* cached = rows.column
    cdef length_t* stale = rows.stale
    cdef BlockSize size = rows.size
    start = attncore_stale_fours(computed, cached, count, size.shift, size.tokens, stale, &num_stale)
    for i in range(start, count):
        stale[num_stale] = i
        num_stale += column_of(computed[i], size) != cached[i]
    rows.num_stale = num_stale
    while rows != NULL:
        for k in range(num_stale):
            i = stale[k]
            column = column_of(computed[i], size)
            if column >= rows.num_blocks[i] or rows.table[<slot_t> i * rows.width + column] < rows.null_ids:
                return False
        rows = rows.next
    return True


cdef inline void cache_block(Rows* rows, length_t i, length_t column) noexcept nogil:
    """The current block of row i, in this group and its followers."""
    if column != rows.column[i]:
        rows.column[i] = column
        while rows != NULL:
            rows.block[i] = rows.table[<slot_t> i * rows.width + column]
            rows = rows.next


cdef inline length_t decodes_fit(BatchState batch, length_t max_model_len) noexcept nogil:
    """Whether every row can run one token: the longest's tokens before it, or -1.

    Then the filling loops need no table: the cached blocks are the current.
    """
    cdef length_t g, k, i, count = batch.num_rows, longest
    cdef Rows* rows
    for g in range(batch.num_decoders):
        if not batch.decoders[g].follows and not find_stale(batch.decoders[g], count):
            return -1
    longest = longest_of(batch.num_computed, count)
    if longest >= max_model_len and count:
        return -1
    # A sum can be too large only where the largest possible one is.
    if <slot_t> count * max_model_len > MAX_INT32 and sum_of(batch.num_computed, count) + count > MAX_INT32:
        return -1
    for g in range(batch.num_decoders):
        rows = batch.decoders[g]
        if rows.follows:
            continue
        for k in range(rows.num_stale):
            i = rows.stale[k]
            cache_block(rows, i, column_of(batch.num_computed[i], rows.size))
    return longest


cdef inline length_t check_blocks(const Rows* rows, length_t i, length_t start, length_t stop,
                                  length_t* failed_token) noexcept nogil:
    """Whether tokens start..stop of row i have blocks of their own in this group."""
    cdef BlockSize size = rows.size
    cdef length_t first_missing, column = column_of(start, size), last = column_of(stop - 1, size)
    if last >= rows.num_blocks[i]:
        first_missing = rows.num_blocks[i] * size.tokens
        failed_token[0] = first_missing if first_missing > start else start
        return TOO_FEW_BLOCKS
    if column == rows.column[i]:  # never the null block
        column += 1
    while column <= last:
        if rows.table[<slot_t> i * rows.width + column] < rows.null_ids:
            failed_token[0] = column * size.tokens if column * size.tokens > start else start
            return NULL_BLOCK
        column += 1
    return OK


cdef length_t check_rows(BatchState batch, const length_t* query_lens, length_t max_model_len, length_t max_num_tokens,
                         length_t max_num_encoder_tokens, Failure* failure) noexcept nogil:
    """The checking pass: whether every scheduled token has a block of its own in every group. Changes nothing."""
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


cdef inline void exchange_lengths(length_t* values, length_t i, length_t j) noexcept nogil:
    cdef length_t value = values[i]
    values[i] = values[j]
    values[j] = value


cdef void swap_blocks(Rows* rows, length_t i, length_t j) noexcept nogil:
    cdef block_id_t* a = rows.table + <slot_t> i * rows.width
    cdef block_id_t* b = rows.table + <slot_t> j * rows.width
    cdef length_t k, count = rows.num_blocks[i]
    cdef block_id_t block
    if rows.num_blocks[j] > count:
        count = rows.num_blocks[j]
    for k in range(count):
        block = a[k]
        a[k] = b[k]
        b[k] = block
    exchange_lengths(rows.num_blocks, i, j)
    if not rows.follows:
        exchange_lengths(rows.column, i, j)
    exchange_lengths(rows.block, i, j)
    rows.synced[i] = rows.synced[j] = 0


cdef void swap_rows(BatchState batch, length_t i, length_t j) noexcept nogil:
    cdef length_t g
    for g in range(batch.num_decoders):
        swap_blocks(batch.decoders[g], i, j)
    if batch.cross != NULL:
        swap_blocks(batch.cross, i, j)
    exchange_lengths(batch.num_computed, i, j)
    exchange_lengths(batch.encoder_lens, i, j)
    exchange_lengths(batch.encoder_done, i, j)


# A step of decodes is a few loops, each over two or three arrays: short enough for the compiler to see that they do not
# overlap, and to run four rows at once.

cdef inline void fill_decode_lengths(const length_t* computed, length_t* context_lens, length_t* seq_lens,
                                     length_t count) noexcept nogil:
    cdef length_t i
    for i in range(count):
        context_lens[i] = computed[i]
        seq_lens[i] = computed[i] + 1


cdef inline void fill_decode_slots(const block_id_t* block, const length_t* last_page_len, slot_t* slots,
                                   BlockSize size, length_t count) noexcept nogil:
    cdef length_t i
    cdef unsigned int tokens = size.tokens  # unsigned numbers widen in one instruction, and multiply in one
    if size.shift >= 0:
        for i in range(count):
            slots[i] = <slot_t> ((<unsigned long long> <unsigned int> block[i] << size.shift)
                                 + <unsigned int> last_page_len[i]) - 1
    else:
        for i in range(count):
            slots[i] = <slot_t> (<unsigned long long> <unsigned int> block[i] * tokens
                                 + <unsigned int> last_page_len[i]) - 1


cdef inline void fill_decode_pages(const length_t* computed, const length_t* column, length_t* last_page_len,
                                   BlockSize size, length_t count) noexcept nogil:
    cdef length_t i, mask = size.tokens - 1
    if size.shift >= 0:
        for i in range(count):
            last_page_len[i] = (computed[i] & mask) + 1
    else:
        for i in range(count):
            last_page_len[i] = computed[i] - column[i] * size.tokens + 1


cdef inline length_t sum_up(const length_t* values, length_t* sums, length_t count) noexcept nogil:
    """sums[i + 1] is the sum of values[0..i] + 1; the last."""
    cdef length_t i, total = 0
    for i in range(attncore_sum_fours(values, sums, count, &total), count):
        total += values[i] + 1
        sums[i + 1] = total
    return total


cdef inline void fill_decode_blocks(GroupFields* out, const Rows* rows, length_t count) noexcept nogil:
    """One group's part of a step in which rows 0..count run one token each."""
    if not out.shares_pages:
        fill_decode_pages(rows.num_computed, rows.column, out.paged_kv_last_page_len, rows.size, count)
        out.num_pages = sum_up(rows.column, out.paged_kv_indptr, count)
    fill_decode_slots(rows.block, out.paged_kv_last_page_len, out.slot_mapping, rows.size, count)


cdef inline void fill_decodes(StepArena out, BatchState batch, length_t count, length_t longest) noexcept nogil:
    """Rows 0..count run one token each, after at most ``longest``. Everything but what counts 0, 1, 2, ...:
    start_counting keeps that.
    """
    cdef length_t i, g, seq_start = 0
    cdef length_t* computed = batch.num_computed
    cdef slot_t* positions = out.positions
    fill_decode_lengths(computed, out.context_lens, out.seq_lens, count)
    for g in range(batch.num_decoders):
        fill_decode_blocks(out.groups + g, batch.decoders[g], count)
    for i in range(count):
        positions[i] = computed[i]
    seq_start = sum_up(computed, out.seq_start_loc, count)
    for i in range(count):
        computed[i] += 1
    out.max_decode_seq_len = longest + 1 if count else 0
    out.num_tokens, out.num_seq_tokens = count, seq_start


cdef inline void start_counting(StepArena out, length_t count) noexcept nogil:
    """Decode row i is token i. A steady batch finds these there from the step before and writes nothing."""
    cdef length_t i
    for i in range(out.counting, count):
        out.query_start_loc[i + 1] = i + 1
        out.logits_indices[i] = i
        out.token_to_req_indices[i] = i
        out.query_lens[i] = 1
    if count > out.counting:
        out.counting = count


cdef inline void fill_blocks(GroupFields* out, Rows* rows, length_t i, length_t token, length_t computed,
                             length_t seq_len) noexcept nogil:
    """One group's part of row i, whose tokens computed..seq_len begin at ``token`` of the step."""
    fill_slots(out.slot_mapping + token, rows.table + <slot_t> i * rows.width, computed, seq_len, rows.size)
    if not rows.follows:
        cache_block(rows, i, column_of(seq_len - 1, rows.size))
    if not out.shares_pages:
        out.num_pages += rows.column[i] + 1
        out.paged_kv_indptr[i + 1] = out.num_pages
        out.paged_kv_last_page_len[i] = seq_len - rows.column[i] * rows.size.tokens


cdef void fill_rows(StepArena out, BatchState batch, length_t start, length_t num_decodes, length_t stop,
                    const length_t* query_lens) noexcept nogil:
    """Rows start..stop run query_lens[row] tokens each; start tokens are there already (a decode each)."""
    cdef length_t i, g, computed, query_len, seq_len, token = start, seq_start = out.num_seq_tokens
    cdef length_t decode_tokens = start, decode_seqs = seq_start
    if out.counting > start:
        out.counting = start
    for i in range(start, stop):
        query_len = query_lens[i]
        computed = batch.num_computed[i]
        seq_len = computed + query_len
        for g in range(batch.num_decoders):
            fill_blocks(out.groups + g, batch.decoders[g], i, token, computed, seq_len)
        count_up(out.positions + token, computed, query_len)
        repeat(out.token_to_req_indices + token, i, query_len)
        batch.num_computed[i] = seq_len
        token += query_len
        seq_start += seq_len
        out.query_lens[i] = query_len
        out.context_lens[i] = computed
        out.seq_lens[i] = seq_len
        out.query_start_loc[i + 1] = token
        out.seq_start_loc[i + 1] = seq_start
        out.logits_indices[i] = token - 1
        if i < num_decodes:
            decode_tokens, decode_seqs = token, seq_start
            out.max_decode_query_len = max(out.max_decode_query_len, query_len)
            out.max_decode_seq_len = max(out.max_decode_seq_len, seq_len)
        else:
            out.max_prefill_query_len = max(out.max_prefill_query_len, query_len)
            out.max_prefill_seq_len = max(out.max_prefill_seq_len, seq_len)
    out.prefill_query_start_loc[0] = 0
    out.prefill_seq_start_loc[0] = 0
    for i in range(num_decodes, stop):
        out.prefill_query_start_loc[i - num_decodes + 1] = out.query_start_loc[i + 1] - decode_tokens
        out.prefill_seq_start_loc[i - num_decodes + 1] = out.seq_start_loc[i + 1] - decode_seqs
    out.num_decode_tokens, out.num_tokens, out.num_seq_tokens = decode_tokens, token, seq_start


cdef void fill_encoder(StepArena out, BatchState batch, length_t num_reqs) noexcept nogil:
    """Encoder lengths of rows 0..num_reqs, and the slots of the encoder tokens that run now: those of no step before.

    Where neither rows nor their blocks changed since this arena's last step, all is there.
    """
    cdef length_t i, length, fresh, token = 0, seq_start = 0
    cdef Rows* rows = batch.cross
    cdef GroupFields* group = out.groups + batch.num_decoders
    if out.version == batch.version and out.changes == batch.changes and out.encoder_reqs == num_reqs:
        return
    out.max_encoder_seq_len = 0
    group.num_pages = 0
    for i in range(num_reqs):
        length = batch.encoder_lens[i]
        fresh = 0 if batch.encoder_done[i] else length
        if fresh:
            fill_slots(group.slot_mapping + token, rows.table + <slot_t> i * rows.width, 0, length, rows.size)
            batch.encoder_done[i] = 1
            token += fresh
        seq_start += length
        out.encoder_seq_lens[i] = length
        out.encoder_query_lens[i] = fresh
        out.encoder_seq_start_loc[i + 1] = seq_start
        out.encoder_query_start_loc[i + 1] = token
        out.max_encoder_seq_len = max(out.max_encoder_seq_len, length)
        group.paged_kv_last_page_len[i] = 0
        if length:
            group.num_pages += column_of(length - 1, rows.size) + 1
            group.paged_kv_last_page_len[i] = offset_of(length - 1, rows.size) + 1
        group.paged_kv_indptr[i + 1] = group.num_pages
    out.num_encoder_tokens, out.num_cross_slots = seq_start, token
    out.encoder_reqs = num_reqs
    # Encoders that ran are done: the next step in this arena says so.
    out.version = -1 if token else batch.version


cdef inline length_t local_len(length_t seq_len, Ranks ranks) noexcept nogil:
    """How many of a request's first seq_len tokens this rank keeps."""
    cdef length_t turn = ranks.world * ranks.interleave
    cdef length_t rest = seq_len % turn - ranks.rank * ranks.interleave
    return seq_len // turn * ranks.interleave + min(max(rest, 0), ranks.interleave)


cdef void keep_local(StepArena out, BatchState batch, Ranks ranks) noexcept nogil:
    """Makes slots, lengths and pages those of one rank's cache; a block holds world times as many tokens in all."""
    cdef length_t i, g, t, tokens, offset, run, pages, seq_start = 0, block
    cdef slot_t slot
    cdef GroupFields* group
    for g in range(batch.num_decoders):
        group = out.groups + g
        tokens = batch.decoders[g].size.tokens
        block = tokens // ranks.world
        for t in range(out.num_tokens):
            slot = group.slot_mapping[t]
            offset = <length_t> (slot % tokens)
            run = offset // ranks.interleave
            group.slot_mapping[t] = -1
            if run % ranks.world == ranks.rank:
                group.slot_mapping[t] = (slot // tokens * block + run // ranks.world * ranks.interleave
                                         + offset % ranks.interleave)
    out.max_decode_seq_len = out.max_prefill_seq_len = 0
    for i in range(out.num_reqs):
        out.context_lens[i] = local_len(out.context_lens[i], ranks)
        out.seq_lens[i] = local_len(out.seq_lens[i], ranks)
        seq_start += out.seq_lens[i]
        out.seq_start_loc[i + 1] = seq_start
        if i < out.num_decodes:
            out.max_decode_seq_len = max(out.max_decode_seq_len, out.seq_lens[i])
        else:
            out.max_prefill_seq_len = max(out.max_prefill_seq_len, out.seq_lens[i])
            out.prefill_seq_start_loc[i - out.num_decodes + 1] = seq_start - out.seq_start_loc[out.num_decodes]
    out.num_seq_tokens = seq_start
    for g in range(batch.num_decoders):
        group = out.groups + g
        if group.shares_pages:
            continue
        block = batch.decoders[g].size.tokens // ranks.world
        pages = 0
        for i in range(out.num_reqs):
            pages += (out.seq_lens[i] + block - 1) // block
            group.paged_kv_indptr[i + 1] = pages
            group.paged_kv_last_page_len[i] = (out.seq_lens[i] - 1) % block + 1 if out.seq_lens[i] else 0
        group.num_pages = pages


cdef void pad_step(StepArena out, BatchState batch, StepShape bucket) noexcept nogil:
    """Rows and tokens behind those of the step, up to the size that a graph was captured for."""
    cdef length_t i, t, g, num_groups = batch.num_decoders + (batch.cross != NULL)
    cdef length_t n = out.num_reqs, reqs = bucket.num_reqs, tokens = bucket.num_tokens
    cdef GroupFields* group
    out.counting = min(out.counting, n)
    for i in range(n, reqs):
        out.seq_lens[i] = bucket.pad_seq_len
        out.context_lens[i] = out.query_lens[i] = out.logits_indices[i] = 0
        out.query_start_loc[i + 1] = out.num_tokens
        out.seq_start_loc[i + 1] = out.seq_start_loc[i] + bucket.pad_seq_len
    if batch.cross != NULL:
        for i in range(n, reqs):
            out.encoder_seq_lens[i] = bucket.pad_seq_len
            out.encoder_query_lens[i] = 0
            out.encoder_seq_start_loc[i + 1] = out.encoder_seq_start_loc[i] + bucket.pad_seq_len
            out.encoder_query_start_loc[i + 1] = out.encoder_query_start_loc[i]
            out.max_encoder_seq_len = max(out.max_encoder_seq_len, bucket.pad_seq_len)
    for g in range(num_groups):
        group = out.groups + g
        if not group.shares_pages:
            for i in range(n, reqs):
                group.paged_kv_indptr[i + 1] = group.num_pages
                group.paged_kv_last_page_len[i] = 0
        if g < batch.num_decoders:
            for t in range(out.num_tokens, tokens):
                group.slot_mapping[t] = -1
    for t in range(out.num_tokens, tokens):
        out.positions[t] = 0
        out.token_to_req_indices[t] = reqs - 1
    out.num_reqs, out.num_tokens, out.num_decode_tokens = reqs, tokens, tokens
    out.max_decode_query_len = bucket.query_len
    out.max_decode_seq_len = max(out.max_decode_seq_len, bucket.pad_seq_len if n < reqs else 0)


cdef length_t write_journal(Rows* rows, length_t num_rows, length_t* entries, length_t room) noexcept nogil:
    """TableState.journal."""
    cdef length_t i, column, count = 0
    for i in range(num_rows):
        column = rows.synced[i]
        if column >= rows.num_blocks[i]:
            continue
        while column < rows.num_blocks[i] and count < room:
            entries[2 * count] = i * rows.width + column
            entries[2 * count + 1] = rows.table[<slot_t> i * rows.width + column]
            count += 1
            column += 1
        rows.synced[i] = column
    return count


@cython.final
cdef class TableState:
    """One KV-cache group's blocks: state int32[4, n] and block table int32[n, width], both owned by the caller.

    The state's rows are blocks held, the cached block's column and id, and how many leading columns a device has
    (``synced``); ``stale`` int32[n] is scratch. A block of the manager's is ``kernel_blocks`` columns. A row's table is
    zero beyond its blocks, always.
    """

    def __init__(self, state, stale, table, length_t block_size, slot_t num_blocks, length_t kernel_blocks):
        cdef length_t[:, ::1] rows = state
        cdef length_t[::1] scratch = stale
        cdef block_id_t[:, ::1] ids = table
        self._keep = state, stale, table
        self.rows = Rows(NULL, &rows[0, 0], &rows[1, 0], &rows[2, 0], &rows[3, 0], &scratch[0], 0, &ids[0, 0],
                         <length_t> ids.shape[1], block_size_of(block_size), kernel_blocks, NULL, False)
        self.capacity, self.width = <length_t> ids.shape[0], <length_t> ids.shape[1]
        self.num_blocks, self.kernel_blocks = num_blocks, kernel_blocks

    def start(self, length_t row):
        """A row begins: no blocks."""
        self.rows.num_blocks[row] = self.rows.block[row] = 0
        self.rows.column[row] = -1

    def append(self, length_t row, ids):
        """Appends block ids to a row: how many, or -1 where one is bad or the row too short; then nothing changed."""
        cdef length_t k, e, held = self.rows.num_blocks[row], room = self.width - held, each = self.kernel_blocks
        cdef block_id_t* tail = self.rows.table + <slot_t> row * self.width + held
        cdef block_id_t first
        cdef slot_t count = -1
        try:
            count = read_ids(readable(ids), tail, room // each, self.num_blocks)
        finally:
            if count < 0:
                memset(tail, 0, room * sizeof(block_id_t))
        if count < 0:
            return -1
        if each > 1:
            for k in range(<length_t> count - 1, -1, -1):
                first = tail[k] * each
                for e in range(each):
                    tail[k * each + e] = first + e
        self.rows.num_blocks[row] = held + <length_t> count * each
        return count

    def truncate(self, length_t row, length_t num_blocks):
        """Keeps a row's first num_blocks ids."""
        cdef block_id_t* ids = self.rows.table + <slot_t> row * self.width
        memset(ids + num_blocks, 0, (self.rows.num_blocks[row] - num_blocks) * sizeof(block_id_t))
        self.rows.num_blocks[row] = num_blocks
        self.rows.synced[row] = min(self.rows.synced[row], num_blocks)
        if self.rows.column[row] >= num_blocks:
            self.rows.column[row] = -1

    def replace(self, length_t row, length_t column, block_id_t block):
        """Another id in a column that the row holds."""
        self.rows.table[<slot_t> row * self.width + column] = block
        self.rows.synced[row] = min(self.rows.synced[row], column)
        if self.rows.column[row] == column:
            self.rows.column[row] = -1

    def needs_block(self, length_t num_rows, length_t[::1] out):
        """Rows whose next token has no block (but could have one), into out; how many."""
        cdef length_t i, column, count = 0
        for i in range(num_rows):
            column = column_of(self.rows.num_computed[i], self.rows.size)
            if self.rows.num_blocks[i] <= column < self.width:
                out[count] = i
                count += 1
        return count

    def pass_windows(self, length_t num_rows, length_t window, length_t num_rollback):
        """Makes null what windows have passed: [(row, ids that it had there)], of the rows that had any.

        Whole blocks of the manager's, before what a query sees after num_rollback tokens are taken back. A row that
        passed them earlier costs one look.
        """
        cdef length_t row, column, computed, each = self.kernel_blocks
        cdef list found = []
        for row in range(num_rows):
            computed = max(self.rows.num_computed[row] - num_rollback, 0)
            column = column_of(max(computed - window + 1, 0), self.rows.size)
            column = min(column, self.rows.num_blocks[row]) // each * each - each
            if column >= 0 and self.rows.table[<slot_t> row * self.width + column] >= self.rows.null_ids:
                found.append((row, self._pass(row, column)))
        return found

    cdef list _pass(self, length_t row, length_t column):
        """Makes the manager's block at ``column`` null, and those before it up to one that is: their ids, in order."""
        cdef length_t e, each = self.kernel_blocks
        cdef block_id_t* ids = self.rows.table + <slot_t> row * self.width
        cdef list passed = []
        while column >= 0 and ids[column] >= self.rows.null_ids:
            passed.append(ids[column] // each)
            for e in range(each):
                ids[column + e] = e
            if column <= self.rows.column[row] < column + each:
                self.rows.column[row] = -1
            self.rows.synced[row] = min(self.rows.synced[row], column)
            column -= each
        passed.reverse()
        return passed

    def journal(self, length_t num_rows, length_t[::1] entries):
        """Columns that a device's table lacks, a flat index and an id in turn; how many fitted into entries.

        Raises each row's watermark to what was written: what does not fit goes with the next call.
        """
        cdef length_t room = <length_t> (entries.shape[0] // 2)
        return write_journal(&self.rows, num_rows, &entries[0], room) if room else 0

    def forget_synced(self):
        """The device's table is not to be relied on: everything goes out again."""
        cdef length_t i
        for i in range(self.capacity):
            self.rows.synced[i] = 0


@cython.final
cdef class BatchState:
    """The requests in flight: state int32[3, n] (tokens computed, encoder tokens, whether those are in the cache).

    ``decoders`` and ``cross`` (or None) are their blocks, a TableState a KV-cache group. ``num_rows`` is the high-water
    mark (rows below it may be empty). ``dirty`` says that rows came, went or sat out since the last build, so that the
    next one must arrange them. ``max_encoder_len`` is what a graph is captured for.
    """

    def __init__(self, state, list decoders, TableState cross):
        cdef length_t[:, ::1] rows = state
        cdef TableState group
        cdef Rows* earlier
        cdef length_t g
        self._keep = state, decoders, cross
        self.num_computed, self.encoder_lens, self.encoder_done = &rows[0, 0], &rows[1, 0], &rows[2, 0]
        self.num_decoders = 0
        for group in decoders:
            group.rows.num_computed = self.num_computed
            for g in range(self.num_decoders):
                earlier = self.decoders[g]
                if earlier.size.tokens == group.rows.size.tokens and not earlier.follows:
                    group.rows.follows, group.rows.column = True, earlier.column
                    group.rows.next, earlier.next = earlier.next, &group.rows
            self.decoders[self.num_decoders] = &group.rows
            self.num_decoders += 1
        self.cross = NULL if cross is None else &cross.rows
        if self.cross != NULL:
            self.cross.num_computed = self.encoder_lens
        self.num_rows = 0
        self.dirty = True
        self.req_ids = ()
        self.busy = False

    def enter(self):
        """Takes the batch for one caller; False where another is inside. One step under the GIL."""
        if self.busy:
            return False
        self.busy = True
        return True

    def leave(self):
        self.busy = False

    def start(self, length_t row, length_t num_computed, length_t encoder_len, bint encoder_done):
        self.num_computed[row] = num_computed
        self.encoder_lens[row] = encoder_len
        self.encoder_done[row] = encoder_done

    def set_computed(self, length_t row, length_t num_computed):
        self.num_computed[row] = num_computed

    def swap(self, length_t i, length_t j):
        """Two rows change places."""
        swap_rows(self, i, j)


cdef inline signed char kind_of(length_t query_len, length_t decode_threshold) noexcept nogil:
    return REST if query_len == 0 else (DECODE if query_len <= decode_threshold else PREFILL)


cdef inline void exchange(signed char* kinds, length_t i, length_t j, length_t* swaps, length_t* count) noexcept nogil:
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


cdef length_t* lengths_of(dict fields, str name) except NULL:
    cdef length_t[::1] view = fields[name]
    return &view[0]


cdef slot_t* slots_of(dict fields, str name) except NULL:
    cdef slot_t[::1] view = fields[name]
    return &view[0]


@cython.final
cdef class StepArena:
    """The outputs of one step: arrays of one arena of the ring (by name, see builder/device/arena.py), and its counts.

    ``groups`` has the arrays of each KV-cache group, the cross group's last. Groups whose page lists are the same
    arrays as an earlier group's have blocks of one size: they are filled once.
    """

    def __init__(self, dict fields, list groups, bint has_cross):
        cdef dict group, other
        cdef GroupFields* out
        cdef length_t g, h
        if len(groups) > MAX_GROUPS + 1:
            raise ValueError(f"groups: {len(groups)} are more than the kernels take")
        self._keep = fields, groups
        self.positions = slots_of(fields, "positions")
        self.token_to_req_indices = lengths_of(fields, "token_to_req_indices")
        self.query_start_loc = lengths_of(fields, "query_start_loc")
        self.seq_start_loc = lengths_of(fields, "seq_start_loc")
        self.seq_lens = lengths_of(fields, "seq_lens")
        self.context_lens = lengths_of(fields, "context_lens")
        self.query_lens = lengths_of(fields, "query_lens")
        self.logits_indices = lengths_of(fields, "logits_indices")
        self.prefill_query_start_loc = lengths_of(fields, "prefill_query_start_loc")
        self.prefill_seq_start_loc = lengths_of(fields, "prefill_seq_start_loc")
        if has_cross:
            self.encoder_seq_lens = lengths_of(fields, "encoder_seq_lens")
            self.encoder_query_lens = lengths_of(fields, "encoder_query_lens")
            self.encoder_seq_start_loc = lengths_of(fields, "encoder_seq_start_loc")
            self.encoder_query_start_loc = lengths_of(fields, "encoder_query_start_loc")
        for g in range(<length_t> len(groups)):
            group, out = groups[g], self.groups + g
            out.slot_mapping = slots_of(group, "slot_mapping")
            out.paged_kv_indptr = lengths_of(group, "paged_kv_indptr")
            out.paged_kv_last_page_len = lengths_of(group, "paged_kv_last_page_len")
            out.shares_pages = False
            for h in range(g):
                other = groups[h]
                out.shares_pages |= other["paged_kv_indptr"] is group["paged_kv_indptr"]
        self.step = -1
        self.req_ids = self.moves = ()
        # Nothing is written before the first step: another bucket's step may stand in this memory.

    cdef void _forget(self) noexcept:
        """Another bucket's step may have written here: nothing of this arena's last step is relied on."""
        cdef length_t g
        self.counting = 0
        self.version = -1
        self.query_start_loc[0] = self.seq_start_loc[0] = 0
        for g in range(MAX_GROUPS + 1):
            if self.groups[g].paged_kv_indptr != NULL:
                self.groups[g].paged_kv_indptr[0] = 0
        if self.encoder_seq_lens != NULL:
            self.encoder_seq_start_loc[0] = self.encoder_query_start_loc[0] = 0


@cython.final
cdef class StepShape:
    """A size of step: its arenas, and what each answers with. A step in arena k answers with ``metadata[k]``.

    Where it pads (``num_reqs`` rows of ``query_len`` tokens, for a captured graph), steps of fewer rows get padded rows
    whose seq_lens are ``pad_seq_len``; ``uniform`` asks that every row runs ``query_len`` tokens. ``commit`` copies a
    step from its arena's bytes, ``sources``, to ``device`` (both uint8), where these are given.
    """

    def __init__(self, list arenas, list metadata, bint pads=False, length_t num_reqs=0, length_t query_len=0,
                 length_t pad_seq_len=0, bint uniform=True, list sources=None, device=None):
        cdef unsigned char[::1] memory
        self.arenas, self.metadata = arenas, metadata
        self._keep = device, sources
        self.device = NULL
        if device is not None:
            memory = device
            self.device, self.nbytes, self.sources = <char*> &memory[0], memory.shape[0], sources
        self.pads, self.num_reqs, self.num_tokens = pads, num_reqs, num_reqs * query_len
        self.query_len, self.pad_seq_len, self.uniform = query_len, pad_seq_len, uniform

    cpdef object commit(self, slot_t step):
        """Copies the arena of ``step`` to where captured graphs read, in host memory."""
        cdef unsigned char[::1] source
        if self.device != NULL:
            source = self.sources[step % len(self.sources)]
            memcpy(self.device, &source[0], self.nbytes)


@cython.final
cdef class StepSender:
    """What goes to a device beside a step's fields: header and journal, in its arena. And the receipt that comes back.

    ``arenas`` int64[depth]: addresses of the arenas; ``groups``: TableState of every table; ``entries``: journal entries
    that an arena has room for; ``receipt`` int64[1]: the last step that the device has read.
    """

    def __init__(self, arenas, list groups, length_t entries, receipt):
        cdef slot_t[::1] addresses = arenas
        cdef slot_t[::1] word = receipt
        cdef TableState group
        self._keep = arenas, groups, receipt
        self.arenas, self.depth, self.receipt = &addresses[0], addresses.shape[0], &word[0]
        self.num_groups, self.entries = 0, entries
        for group in groups:
            self.groups[self.num_groups] = &group.rows
            self.num_groups += 1

    def write(self, slot_t step, StepShape bucket, StepArena out, length_t num_rows):
        """A step's rows, tokens and journal; how many entries that has: where all room is taken, there may be more."""
        cdef char* arena = <char*> <size_t> self.arenas[step % self.depth]
        cdef slot_t* header = <slot_t*> arena
        cdef length_t* entries = <length_t*> (arena + bucket.tail)
        cdef length_t g, count, total = 0
        header[1], header[2] = out.num_reqs, out.num_tokens
        for g in range(self.num_groups):
            count = write_journal(self.groups[g], num_rows, entries + 2 * total, self.entries - total)
            header[3 + g] = count
            total += count
        return total

    def publish(self, slot_t step):
        """The step's number, behind everything else: from now on the device may read it."""
        attncore_store(<slot_t*> <size_t> self.arenas[step % self.depth], step)

    def seen(self, slot_t step):
        """Whether the device has read ``step``."""
        return attncore_load(self.receipt) >= step


@cython.final
cdef class StepKernel:
    """Builds a step into the next arena.

    ``query_lens`` int32[capacity] is where the caller writes who runs how much (0: not in this step) before ``check``;
    ``swaps`` int32[capacity, 2] is where ``arrange`` writes what it moved; ``kinds`` int8[capacity] is scratch. Of
    ``world`` ranks, ``rank`` keeps its turns of ``interleave`` tokens.
    """

    def __init__(self, BatchState batch, StepShape eager, query_lens, swaps, kinds, length_t max_model_len,
                 length_t max_num_tokens, length_t max_num_encoder_tokens, length_t decode_threshold,
                 length_t world, length_t rank, length_t interleave):
        cdef length_t[::1] lens = query_lens
        cdef length_t[:, ::1] pairs = swaps
        cdef signed char[::1] scratch = kinds
        self.batch, self.eager = batch, eager
        self._keep = query_lens, swaps, kinds
        self.query_lens, self.swaps, self.kinds = &lens[0], &pairs[0, 0], &scratch[0]
        self.depth = len(eager.arenas)
        self.max_model_len, self.max_num_tokens = max_model_len, max_num_tokens
        self.max_num_encoder_tokens, self.decode_threshold = max_num_encoder_tokens, decode_threshold
        self.ranks = Ranks(world, rank, interleave)
        self.buckets = {}
        self.next_step = 0
        self.last = [None] * self.depth

    def decode_step(self):
        """Every row runs one token: the metadata, or None where rows must be arranged or something is wrong."""
        return None if self.batch.busy else self.decode_step_inside(self.eager)

    def add_bucket(self, StepShape bucket):
        """A bucket that ``padded_step`` finds by its num_reqs."""
        self.buckets[bucket.num_reqs] = bucket

    def drop_bucket(self, size):
        del self.buckets[size]

    def padded_step(self, size):
        """decode_step for the bucket of ``size`` rows, brought to where graphs read; None where that cannot be."""
        cdef object found = self.buckets.get(size) if type(size) is int else None, metadata
        if found is None or self.batch.busy:
            return None
        metadata = self.decode_step_inside(<StepShape> found)
        if metadata is not None:
            (<StepShape> found).commit(self.next_step - 1)
        return metadata

    cpdef object decode_step_inside(self, StepShape bucket):
        """The same, for the caller that has entered the batch."""
        cdef BatchState batch = self.batch
        cdef length_t longest
        if batch.dirty or batch.num_rows > self.max_num_tokens:
            return None
        if bucket.pads and (batch.num_rows > bucket.num_reqs or bucket.query_len != 1):
            return None
        longest = decodes_fit(batch, self.max_model_len)
        if longest < 0:
            return None
        return self._run(bucket, batch.num_rows, batch.num_rows, batch.num_rows, longest)

    def forget_arena(self, Py_ssize_t arena):
        """Somebody wrote to an arena: nothing of its last step is relied on."""
        self.last[arena] = None

    def schedule_all(self, length_t query_len):
        """Writes query_lens: query_len tokens a row."""
        repeat(self.query_lens, query_len, self.batch.num_rows)

    def check(self):
        """The checking pass over query_lens: (code, row, token, group)."""
        cdef Failure failure = Failure(0, 0, 0)
        cdef length_t code = check_rows(self.batch, self.query_lens, self.max_model_len, self.max_num_tokens,
                                        self.max_num_encoder_tokens, &failure)
        return code, failure.row, failure.token, failure.group

    def check_bucket(self, StepShape bucket):
        """Whether the checked step fits a bucket that pads: (code, row, number of rows)."""
        cdef length_t i, count = 0, query_len
        for i in range(self.batch.num_rows):
            query_len = self.query_lens[i]
            if query_len == 0:
                continue
            count += 1
            if query_len > bucket.query_len or (bucket.uniform and query_len != bucket.query_len):
                return QUERY_NOT_CAPTURED, i, 0
            if self.batch.cross != NULL and self.batch.encoder_lens[i] and not self.batch.encoder_done[i]:
                return ENCODER_NOT_CAPTURED, i, 0
        return OK if count <= bucket.num_reqs else TOO_MANY_ROWS, 0, count

    def arrange(self):
        """Orders rows and query_lens: decodes (up to the threshold), prefills (more), rest (0), by the fewest swaps.

        Answers (number of swaps, decodes, decodes and prefills).
        """
        cdef length_t i, count, num_decodes = 0, num_prefills = 0, n = self.batch.num_rows
        for i in range(n):
            self.kinds[i] = kind_of(self.query_lens[i], self.decode_threshold)
            num_decodes += self.kinds[i] == DECODE
            num_prefills += self.kinds[i] == PREFILL
        count = plan_swaps(self.kinds, n, num_decodes, num_prefills, self.swaps)
        for i in range(count):
            swap_rows(self.batch, self.swaps[2 * i], self.swaps[2 * i + 1])
            exchange_lengths(self.query_lens, self.swaps[2 * i], self.swaps[2 * i + 1])
        return count, num_decodes, num_decodes + num_prefills

    def step(self, StepShape bucket, length_t num_decodes, length_t num_reqs):
        """The mutating pass over arranged and checked rows; the metadata. The caller sets the arena's moves."""
        cdef BatchState batch = self.batch
        cdef length_t i, g, num_ones = 0
        while num_ones < num_decodes and self.query_lens[num_ones] == 1:
            num_ones += 1
        for g in range(batch.num_decoders):
            if not batch.decoders[g].follows:
                for i in range(num_ones):
                    cache_block(batch.decoders[g], i, column_of(batch.num_computed[i], batch.decoders[g].size))
        batch.version += 1
        return self._run(bucket, num_ones, num_decodes, num_reqs, longest_of(batch.num_computed, num_ones))

    def empty_step(self, StepShape bucket, length_t max_seq_len):
        """A step of no rows, all padding; ``max_seq_len``, where not 0, is the largest that a graph may meet."""
        cdef StepArena out
        cdef object metadata = self._run(bucket, 0, 0, 0, 0)
        out = <StepArena> PyList_GET_ITEM(bucket.arenas, <Py_ssize_t> ((self.next_step - 1) % self.depth))
        out.req_ids = ()
        if max_seq_len:
            out.max_seq_len = out.max_decode_seq_len = max_seq_len
            out.max_encoder_seq_len = self.batch.max_encoder_len
            out.version = -1  # the next step's longest encoder is another
        return metadata

    def undo(self, StepShape bucket, length_t num_swaps):
        """Takes the last step back: its tokens, its encoders, its number, and its num_swaps swaps, the last first."""
        cdef BatchState batch = self.batch
        cdef StepArena out
        cdef length_t i
        self.next_step -= 1
        out = <StepArena> PyList_GET_ITEM(bucket.arenas, <Py_ssize_t> (self.next_step % self.depth))
        for i in range(out.num_actual_reqs):
            batch.num_computed[i] -= out.query_lens[i]
            if batch.cross != NULL and out.encoder_query_lens[i]:
                batch.encoder_done[i] = 0
        batch.version += 1
        (<object> PyList_GET_ITEM(bucket.metadata, <Py_ssize_t> (self.next_step % self.depth))).forget_step()
        while num_swaps:
            num_swaps -= 1
            swap_rows(batch, self.swaps[2 * num_swaps], self.swaps[2 * num_swaps + 1])

    cdef object _run(self, StepShape bucket, length_t num_ones, length_t num_decodes, length_t num_reqs,
                     length_t longest_one):
        cdef Py_ssize_t k = <Py_ssize_t> (self.next_step % self.depth)
        cdef StepArena out = <StepArena> PyList_GET_ITEM(bucket.arenas, k)
        cdef BatchState batch = self.batch
        cdef object metadata = <object> PyList_GET_ITEM(bucket.metadata, k)
        cdef length_t num_tokens = out.num_tokens, old_num_reqs = out.num_reqs, num_cross_slots = out.num_cross_slots
        if <PyObject*> out != PyList_GET_ITEM(self.last, k):
            self.last[k] = out
            out._forget()
        fill_decodes(out, batch, num_ones, longest_one)
        start_counting(out, num_ones)
        out.max_decode_query_len = 1
        out.max_prefill_query_len = out.max_prefill_seq_len = 0
        out.num_decode_tokens = num_ones
        if num_ones < num_reqs:
            fill_rows(out, batch, num_ones, num_decodes, num_reqs, self.query_lens)
        out.num_decodes = num_decodes
        out.num_reqs = out.num_actual_reqs = num_reqs
        out.num_actual_tokens = out.num_tokens
        out.num_prefills = num_reqs - num_decodes
        out.num_prefill_tokens = out.num_tokens - out.num_decode_tokens
        if self.ranks.world > 1:
            keep_local(out, batch, self.ranks)
        if batch.cross != NULL:
            fill_encoder(out, batch, num_reqs)
        if bucket.pads:
            pad_step(out, batch, bucket)
        out.max_query_len = out.max_prefill_query_len
        if num_decodes or bucket.pads:
            out.max_query_len = max(out.max_query_len, out.max_decode_query_len)
        out.max_seq_len = max(out.max_decode_seq_len, out.max_prefill_seq_len)
        out.step = self.next_step
        out.req_ids = batch.req_ids
        out.changes = batch.changes
        out.moves = ()
        self.next_step += 1
        if out.num_tokens != num_tokens or out.num_reqs != old_num_reqs or out.num_cross_slots != num_cross_slots:
            metadata.forget_views()
        return metadata


# ---- the list door ---------------------------------------------------------------------------------------------------

cdef inline length_t capped_len(length_t seq_len, length_t window, length_t block_size) noexcept nogil:
    """The length that a windowed decode shows the kernel: whole blocks of the window and the started one."""
    cdef slot_t cap = <slot_t> ((window - 1) // block_size + 1) * block_size + seq_len % block_size
    return seq_len if seq_len < cap else <length_t> cap


@cython.final
cdef class GroupReader:
    """Reads one step of the list door into scratch of its own, checks it, and fills the caller's arrays."""

    def __cinit__(self):
        self.capacity, self.ids_capacity = 64, 4096
        self.entries = <Entry*> malloc(self.capacity * sizeof(Entry))
        self.ids = <block_id_t*> malloc(self.ids_capacity * sizeof(block_id_t))
        if self.entries == NULL or self.ids == NULL:
            raise MemoryError("GroupReader: no memory for its scratch")

    def __dealloc__(self):
        free(self.entries)
        free(self.ids)

    cdef int _reserve_entries(self) except -1:
        cdef Entry* entries
        if self.num_seqs < self.capacity:
            return 0
        entries = <Entry*> realloc(self.entries, 2 * self.capacity * sizeof(Entry))
        if entries == NULL:
            raise MemoryError(f"GroupReader: no memory for {2 * self.capacity} sequences")
        self.entries, self.capacity = entries, 2 * self.capacity
        return 0

    cdef int _reserve_ids(self, slot_t extra) except -1:
        cdef block_id_t* ids
        cdef slot_t capacity = self.ids_capacity
        if self.num_ids + extra <= capacity:
            return 0
        while capacity < self.num_ids + extra:
            capacity *= 2
        ids = <block_id_t*> realloc(self.ids, capacity * sizeof(block_id_t))
        if ids == NULL:
            raise MemoryError(f"GroupReader: no memory for {capacity} block ids")
        self.ids, self.ids_capacity = ids, capacity
        return 0

    def enter(self):
        """Takes the reader for one step; False where another caller, or this one further up, is inside."""
        if self.busy:
            return False
        self.busy = True
        return True

    def leave(self):
        self.busy = False

    def read(self, groups):
        """Reads SequenceGroups (is_prompt, sequences, prefix_cache_hit): False where something is malformed."""
        cdef object group, sequence, sequences, is_prompt, hit
        cdef length_t first, i
        self.num_seqs = 0
        self.num_ids = 0
        for group in groups:
            # Groups and sequences are named tuples: their items are read from the tuple, not through an attribute.
            if not isinstance(group, tuple) or PyTuple_GET_SIZE(group) < 3:
                return False
            first = self.num_seqs
            is_prompt = <object> PyTuple_GET_ITEM(group, 0)
            sequences = <object> PyTuple_GET_ITEM(group, 1)
            hit = <object> PyTuple_GET_ITEM(group, 2)
            if type(is_prompt) is not bool or type(hit) is not bool:
                return False
            if type(sequences) is not list:
                if not isinstance(sequences, (list, tuple)):
                    return False
                sequences = list(sequences)
            for sequence in <list> sequences:
                if self._read_sequence(sequence, is_prompt is True, hit is True) == 0:
                    return False
            if self.num_seqs == first:
                return False
            if self.num_seqs - first > 1:
                if len({sequence[0] for sequence in sequences}) != self.num_seqs - first:
                    return False
                for i in range(first + 1, self.num_seqs):
                    if (self.entries[i].num_ids < 0) != (self.entries[first].num_ids < 0):
                        return False
            if first and is_prompt is True and not self.entries[first - 1].is_prompt:
                return False
        return self.num_seqs > 0

    cdef int _read_sequence(self, object sequence, bint is_prompt, bint hit) except -1:
        cdef slot_t seq_id = 0, query_len = 0, context_len = 0, count = -1
        cdef object ids
        cdef Entry* entry
        if not isinstance(sequence, tuple) or PyTuple_GET_SIZE(sequence) < 4:
            return 0
        if (attncore_read_int(<PyObject*> PyTuple_GET_ITEM(sequence, 0), &seq_id) == 0
                or attncore_read_int(<PyObject*> PyTuple_GET_ITEM(sequence, 1), &query_len) == 0
                or attncore_read_int(<PyObject*> PyTuple_GET_ITEM(sequence, 2), &context_len) == 0):
            return 0
        if query_len < 1 or context_len < 0 or query_len > MAX_INT32 or context_len > MAX_INT32 - query_len:
            return 0
        ids = <object> PyTuple_GET_ITEM(sequence, 3)
        if ids is not None:
            ids = readable(ids)
            if ids is None or len(ids) > MAX_INT32:
                return 0
            self._reserve_ids(len(ids))
            count = read_ids(ids, self.ids + self.num_ids, self.ids_capacity - self.num_ids, <slot_t> MAX_INT32 + 1)
            if count < 0:
                return 0
        self._reserve_entries()
        entry = self.entries + self.num_seqs
        entry.first_id, entry.num_ids = self.num_ids, <length_t> count
        entry.query_len, entry.context_len = <length_t> query_len, <length_t> context_len
        entry.is_prompt, entry.hit = is_prompt, hit
        if count > 0:
            self.num_ids += count
        self.num_seqs += 1
        return 1

    def measure(self, length_t block_size, length_t window, bint chunked_prefill, bint hit_anywhere,
                bint multi_token_decode):
        """Checks what was read and settles each row's kernel length and table (window 0: none).

        Answers a tuple (code, row, token, num_tokens, num_seq_tokens, num_prefills, num_prefill_tokens, widest row,
        pages, max_query_len, max_prefill_seq_len, max_decode_seq_len, max_decode_query_len, longest kernel length);
        row and token belong to a code that is not OK.
        """
        cdef length_t i, seq_len, needed, width = 0, longest = 0, num_prefills = 0
        cdef length_t max_query_len = 0, max_prefill = 0, max_decode = 0, max_decode_query = 1, code = OK, token = 0
        cdef slot_t num_tokens = 0, num_seq_tokens = 0, num_prefill_tokens = 0, pages = 0
        cdef bint any_hit = False
        cdef Entry* entry
        if hit_anywhere:
            for i in range(self.num_seqs):
                any_hit |= self.entries[i].hit
        for i in range(self.num_seqs):
            entry = self.entries + i
            seq_len = entry.context_len + entry.query_len
            needed = (seq_len - 1) // block_size + 1
            entry.kernel_len = seq_len
            entry.row_start = entry.row_count = 0
            if entry.is_prompt:
                num_prefills += 1
                num_prefill_tokens += entry.query_len
                max_prefill = max(max_prefill, seq_len)
                if entry.hit and window:
                    code = HIT_WITH_WINDOW
                elif entry.context_len and not chunked_prefill and not entry.hit:
                    code = CONTEXT_WITHOUT_CHUNKS
            else:
                if window:
                    entry.kernel_len = capped_len(seq_len, window, block_size)
                if entry.hit:
                    code = HIT_ON_DECODE
                elif entry.query_len > 1 and not multi_token_decode:
                    code = QUERY_TOO_LONG
            if code != OK:
                return code, i, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
            if entry.num_ids >= 0:
                if needed > entry.num_ids:
                    code, token = TOO_FEW_BLOCKS, max(entry.context_len, entry.num_ids * block_size)
                    if entry.is_prompt and window and entry.query_len - window > token:
                        token = entry.query_len - window
                    return code, i, token, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
                pages += needed
                if not entry.is_prompt and window:
                    entry.row_count = (window - 1) // block_size + 1 + (seq_len % block_size != 0)
                    entry.row_count = min(entry.row_count, needed)
                    entry.row_start = needed - entry.row_count
                elif not entry.is_prompt or chunked_prefill or entry.hit or any_hit:
                    entry.row_count = entry.num_ids
            if not entry.is_prompt:
                max_decode = max(max_decode, entry.kernel_len)
                max_decode_query = max(max_decode_query, entry.query_len)
            width = max(width, entry.row_count)
            longest = max(longest, entry.kernel_len)
            max_query_len = max(max_query_len, entry.query_len)
            num_tokens += entry.query_len
            num_seq_tokens += entry.kernel_len
        if num_tokens > MAX_INT32 or num_seq_tokens > MAX_INT32 or pages > MAX_INT32:
            code = TOO_MANY_SEQ_TOKENS
        return (code, 0, 0, num_tokens, num_seq_tokens, num_prefills, num_prefill_tokens, width, pages, max_query_len,
                max_prefill, max_decode, max_decode_query, longest)

    def fill(self, length_t block_size, length_t window, length_t pad, slot_t[::1] slot_mapping, slot_t[::1] positions,
             length_t[::1] token_to_req_indices, length_t[::1] seq_lens, length_t[::1] context_lens,
             length_t[::1] query_lens, length_t[::1] query_start_loc, length_t[::1] seq_start_loc,
             length_t[::1] logits_indices):
        """Fills the fields of every layout; pad rows at the end are a graph's."""
        cdef BlockSize block = block_size_of(block_size)
        cdef length_t i, k, masked, token = 0, seq_start = 0, n = self.num_seqs
        cdef slot_t before_window
        cdef Entry* entry
        query_start_loc[0] = seq_start_loc[0] = 0
        for i in range(n):
            entry = self.entries + i
            masked = entry.query_len if entry.num_ids < 0 else 0
            if entry.num_ids >= 0 and entry.is_prompt and window:
                before_window = <slot_t> entry.query_len - window - entry.context_len
                masked = <length_t> min(max(before_window, 0), entry.query_len)
            for k in range(masked):
                slot_mapping[token + k] = -1
            if masked < entry.query_len:
                fill_slots(&slot_mapping[token + masked], self.ids + entry.first_id, entry.context_len + masked,
                           entry.context_len + entry.query_len, block)
            count_up(&positions[token], entry.context_len, entry.query_len)
            repeat(&token_to_req_indices[token], i, entry.query_len)
            token += entry.query_len
            seq_start += entry.kernel_len
            seq_lens[i] = entry.kernel_len
            context_lens[i] = entry.context_len
            query_lens[i] = entry.query_len
            query_start_loc[i + 1] = token
            seq_start_loc[i + 1] = seq_start
            logits_indices[i] = token - 1
        for i in range(pad):
            slot_mapping[token + i] = -1
            positions[token + i] = 0
            token_to_req_indices[token + i] = n + i
            seq_lens[n + i] = 1
            seq_start += 1
            seq_start_loc[n + i + 1] = seq_start

    def fill_table(self, block_id_t[:, :] table):
        """Fills int32[rows, width] (rows contiguous), rows beyond the sequences and every tail with 0."""
        cdef length_t i, count, width = <length_t> table.shape[1]
        cdef Entry* entry
        if width == 0:
            return
        for i in range(<length_t> table.shape[0]):
            count = 0
            if i < self.num_seqs:
                entry = self.entries + i
                count = min(entry.row_count, width)
                memcpy(&table[i, 0], self.ids + entry.first_id + entry.row_start, count * sizeof(block_id_t))
            memset(&table[i, 0] + count, 0, (width - count) * sizeof(block_id_t))

    def fill_pages(self, length_t block_size, length_t[::1] indptr, block_id_t[::1] indices,
                   length_t[::1] last_page_len):
        """Fills the page lists of every sequence; requests beyond them are empty."""
        cdef length_t i, needed, seq_len, pages = 0
        cdef Entry* entry
        indptr[0] = 0
        for i in range(<length_t> last_page_len.shape[0]):
            last_page_len[i] = 0
            if i < self.num_seqs and self.entries[i].num_ids >= 0:
                entry = self.entries + i
                seq_len = entry.context_len + entry.query_len
                needed = (seq_len - 1) // block_size + 1
                memcpy(&indices[0] + pages,
                       self.ids + entry.first_id, needed * sizeof(block_id_t))
                pages += needed
                last_page_len[i] = (seq_len - 1) % block_size + 1
            indptr[i + 1] = pages


# ---- array functions: one field each, for callers that hold their own state ------------------------------------------

def fill_slot_mapping(const block_id_t[:, ::1] block_table, const length_t[::1] context_lens,
                      const length_t[::1] query_lens, length_t block_size, slot_t[::1] out):
    """slot_mapping of a rectangle of block ids; the caller has checked that every token has a column."""
    cdef BlockSize block = block_size_of(block_size)
    cdef length_t i
    cdef slot_t token = 0
    for i in range(<length_t> query_lens.shape[0]):
        if query_lens[i]:
            fill_slots(&out[token], &block_table[i, 0], context_lens[i], context_lens[i] + query_lens[i], block)
            token += query_lens[i]


def fill_positions(const length_t[::1] context_lens, const length_t[::1] query_lens, slot_t[::1] positions,
                   length_t[::1] token_to_req_indices):
    """positions and token_to_req_indices of a batch; both int[num_tokens]."""
    cdef length_t i
    cdef slot_t token = 0
    for i in range(<length_t> query_lens.shape[0]):
        if query_lens[i]:
            count_up(&positions[token], context_lens[i], query_lens[i])
            repeat(&token_to_req_indices[token], i, query_lens[i])
            token += query_lens[i]


def fill_page_indices(const block_id_t[:, :] block_table, const length_t[::1] indptr, block_id_t[::1] out):
    """paged_kv_indices of a rectangle (rows contiguous): the first indptr[i + 1] - indptr[i] ids of every row."""
    cdef length_t i, count
    for i in range(<length_t> indptr.shape[0] - 1):
        count = indptr[i + 1] - indptr[i]
        if count:
            memcpy(&out[indptr[i]], &block_table[i, 0], count * sizeof(block_id_t))


def fill_block_table(list rows, block_id_t[:, ::1] out):
    """Pads rows of block ids to the rectangle out with 0; the index of the first bad row, or -1."""
    cdef slot_t count
    cdef length_t i, width = <length_t> out.shape[1]
    for i in range(<length_t> out.shape[0]):
        if width == 0:
            if len(rows[i]):
                return i
            continue
        count = read_ids(readable(rows[i]), &out[i, 0], width, <slot_t> MAX_INT32 + 1)
        if count < 0:
            return i
        memset(&out[i, 0] + count, 0, (width - count) * sizeof(block_id_t))
    return -1


def classify(const length_t[::1] query_lens, const length_t[::1] context_lens, length_t decode_threshold,
             length_t extend_threshold, signed char[::1] kinds, slot_t[::1] counts):
    """The kind of each row into kinds (0 decode, 1 short extend, 2 prefill); counts int64[6]: rows and tokens by kind.

    A row of more than decode_threshold tokens is an extend where it has context and at most extend_threshold tokens;
    without context_lens (of length 0) none is.
    """
    cdef length_t i, query_len, num_rows[3]
    cdef slot_t num_tokens[3]
    cdef signed char kind
    cdef bint extends = context_lens.shape[0] > 0
    num_rows[:] = [0, 0, 0]
    num_tokens[:] = [0, 0, 0]
    for i in range(<length_t> query_lens.shape[0]):
        query_len = query_lens[i]
        kind = 0
        if query_len > decode_threshold:
            kind = 1 if extends and context_lens[i] and query_len <= extend_threshold else 2
        kinds[i] = kind
        num_rows[kind] += 1
        num_tokens[kind] += query_len
    for i in range(3):
        counts[i], counts[3 + i] = num_rows[i], num_tokens[i]


def order_kinds(signed char[::1] kinds, length_t[:, ::1] swaps):
    """The fewest swaps of rows that bring kinds 0, 1, 2 into order, as kinds then are; how many are in swaps."""
    cdef length_t i, n = <length_t> kinds.shape[0], first = 0, second = 0
    for i in range(n):
        first += kinds[i] == 0
        second += kinds[i] == 1
    return plan_swaps(&kinds[0], n, first, second, &swaps[0, 0]) if n else 0
