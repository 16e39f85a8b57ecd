"""The compiled hot path: slots, lengths, prefix sums, tables and page lists of one step.

Two classes a door. The persistent door has BlockRows (the requests in flight: 16 bytes each and a block table),
StepArena (the outputs of one step) and StepKernel (check, then one pass over the rows). The list door has GroupReader
(reads lists of block ids, checks, fills). Every buffer is acquired once, at construction. The loops are ``noexcept
nogil`` C, called with the GIL held: giving it up costs up to the switch interval when another thread is busy.

Nothing here writes an error's text: a check answers with a code and the indices, a bad object with "bad", and the
Python side (builder/problems.py) says what is wrong. _slots_numba.py is the twin, function by function.
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
    """
    const char* ATTNCORE_READS_INTS
    int attncore_read_int(PyObject* item, slot_t* value) except -1

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


cdef inline bint decodes_fit(Rows* rows, length_t count, length_t max_model_len) noexcept nogil:
    """Whether rows 0..count can run one token each: check_rows for the common case, without saying what is wrong.

    Then refreshes the cached block of the rows that begin a new one, so that the filling loops need no table.
    """
    cdef length_t i, column, num_stale = 0
    cdef const length_t* computed = rows.num_computed
    cdef const length_t* cached = rows.column
    cdef BlockSize size = rows.size
    for i in range(count):
        column = column_of(computed[i], size)
        if column != cached[i]:
            if column >= rows.num_blocks[i] or rows.table[<slot_t> i * rows.width + column] == 0:
                return False
            rows.stale[num_stale] = i
            num_stale += 1
    if longest_of(computed, count) >= max_model_len and count:
        return False
    # A sum can be too large only where the largest possible one is.
    if <slot_t> count * max_model_len > MAX_INT32 and sum_of(computed, count) + count > MAX_INT32:
        return False
    for i in range(num_stale):
        cache_block(rows, rows.stale[i], column_of(computed[rows.stale[i]], size))
    return True


cdef length_t check_rows(const Rows* rows, length_t num_rows, const length_t* query_lens, length_t max_model_len,
                         length_t max_num_tokens, length_t* failed_row, length_t* failed_token) noexcept nogil:
    """The checking pass: whether every scheduled token has a block of its own. Changes nothing."""
    cdef length_t i, query_len, computed, column, last, first_missing
    cdef slot_t num_tokens = 0, num_seq_tokens = 0
    cdef BlockSize size = rows.size
    for i in range(num_rows):
        query_len = query_lens[i]
        if query_len == 0:
            continue
        computed = rows.num_computed[i]
        failed_row[0] = i
        if query_len > max_model_len - computed:
            return TOO_LONG
        last = column_of(computed + query_len - 1, size)
        if last >= rows.num_blocks[i]:
            first_missing = rows.num_blocks[i] * size.tokens
            failed_token[0] = first_missing if first_missing > computed else computed
            return TOO_FEW_BLOCKS
        column = column_of(computed, size)
        if column == rows.column[i]:  # never the null block
            column += 1
        while column <= last:
            if rows.table[<slot_t> i * rows.width + column] == 0:
                failed_token[0] = column * size.tokens if column * size.tokens > computed else computed
                return NULL_BLOCK
            column += 1
        num_tokens += query_len
        num_seq_tokens += computed + query_len
    if num_tokens > max_num_tokens:
        return TOO_MANY_TOKENS
    if num_seq_tokens > MAX_INT32:
        return TOO_MANY_SEQ_TOKENS
    return OK


cdef inline void cache_block(Rows* rows, length_t i, length_t column) noexcept nogil:
    if column != rows.column[i]:
        rows.column[i] = column
        rows.block[i] = rows.table[<slot_t> i * rows.width + column]


cdef inline void exchange_lengths(length_t* values, length_t i, length_t j) noexcept nogil:
    cdef length_t value = values[i]
    values[i] = values[j]
    values[j] = value


cdef void swap_rows(Rows* rows, length_t i, length_t j) noexcept nogil:
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
    exchange_lengths(rows.num_computed, i, j)
    exchange_lengths(rows.num_blocks, i, j)
    exchange_lengths(rows.column, i, j)
    exchange_lengths(rows.block, i, j)


# A step of decodes is a few loops, each over two or three arrays: short enough for the compiler to see that they do not
# overlap, and to run four rows at once.

cdef inline void fill_decode_lengths(const length_t* computed, length_t* context_lens, length_t* seq_lens,
                                     length_t count) noexcept nogil:
    cdef length_t i
    for i in range(count):
        context_lens[i] = computed[i]
        seq_lens[i] = computed[i] + 1


cdef inline void fill_decode_slots(const length_t* computed, const block_id_t* block, slot_t* slots, BlockSize size,
                                   length_t count) noexcept nogil:
    cdef length_t i, mask = size.tokens - 1
    if size.shift >= 0:
        for i in range(count):
            slots[i] = (<slot_t> block[i] << size.shift) | (computed[i] & mask)
    else:
        for i in range(count):
            slots[i] = <slot_t> block[i] * size.tokens + computed[i] % size.tokens


cdef inline void fill_decode_pages(const length_t* computed, const length_t* column, length_t* last_page_len,
                                   BlockSize size, length_t count) noexcept nogil:
    cdef length_t i, mask = size.tokens - 1
    if size.shift >= 0:
        for i in range(count):
            last_page_len[i] = (computed[i] & mask) + 1
    else:
        for i in range(count):
            last_page_len[i] = computed[i] - column[i] * size.tokens + 1


cdef inline void fill_decodes(StepArena out, Rows* rows, length_t count) noexcept nogil:
    """Rows 0..count run one token each. Everything but what counts 0, 1, 2, ..., which start_counting keeps."""
    cdef length_t i, pages = 0, seq_start = 0
    cdef length_t* computed = rows.num_computed
    cdef const length_t* column = rows.column
    cdef slot_t* positions = out.positions
    cdef length_t* seq_start_loc = out.seq_start_loc
    cdef length_t* indptr = out.paged_kv_indptr
    fill_decode_lengths(computed, out.context_lens, out.seq_lens, count)
    fill_decode_slots(computed, rows.block, out.slot_mapping, rows.size, count)
    fill_decode_pages(computed, column, out.paged_kv_last_page_len, rows.size, count)
    memcpy(out.last_blocks, rows.block, count * sizeof(block_id_t))
    for i in range(count):
        positions[i] = computed[i]
    for i in range(count):
        seq_start += computed[i] + 1
        seq_start_loc[i + 1] = seq_start
        pages += column[i] + 1
        indptr[i + 1] = pages
    for i in range(count):
        computed[i] += 1
    out.max_decode_seq_len = longest_of(computed, count)
    out.num_tokens, out.num_pages, out.num_seq_tokens = count, pages, seq_start


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


cdef inline void fill_prefills(StepArena out, Rows* rows, length_t start, length_t stop,
                               const length_t* query_lens) noexcept nogil:
    """Rows start..stop run query_lens[row] tokens each; start tokens are there already (a decode each)."""
    cdef length_t i, computed, query_len, seq_len, token = start
    cdef length_t pages = out.num_pages, seq_start = out.num_seq_tokens, decode_seqs = seq_start
    if out.counting > start:
        out.counting = start
    out.prefill_query_start_loc[0] = 0
    out.prefill_seq_start_loc[0] = 0
    for i in range(start, stop):
        query_len = query_lens[i]
        computed = rows.num_computed[i]
        seq_len = computed + query_len
        fill_slots(out.slot_mapping + token, rows.table + <slot_t> i * rows.width, computed, seq_len, rows.size)
        count_up(out.positions + token, computed, query_len)
        repeat(out.token_to_req_indices + token, i, query_len)
        cache_block(rows, i, column_of(seq_len - 1, rows.size))
        rows.num_computed[i] = seq_len
        token += query_len
        pages += rows.column[i] + 1
        seq_start += seq_len
        out.query_lens[i] = query_len
        out.context_lens[i] = computed
        out.seq_lens[i] = seq_len
        out.query_start_loc[i + 1] = token
        out.seq_start_loc[i + 1] = seq_start
        out.prefill_query_start_loc[i - start + 1] = token - start
        out.prefill_seq_start_loc[i - start + 1] = seq_start - decode_seqs
        out.logits_indices[i] = token - 1
        out.last_blocks[i] = rows.block[i]
        out.paged_kv_indptr[i + 1] = pages
        out.paged_kv_last_page_len[i] = seq_len - rows.column[i] * rows.size.tokens
        if query_len > out.max_query_len:
            out.max_query_len = query_len
        if seq_len > out.max_prefill_seq_len:
            out.max_prefill_seq_len = seq_len
    out.num_tokens, out.num_pages, out.num_seq_tokens = token, pages, seq_start


@cython.final
cdef class BlockRows:
    """The requests in flight: hot state int32[4, n] and block table int32[n, width], both owned by the caller.

    The state's rows are those of ``Rows``: tokens computed, blocks held, the cached block's column and id; ``stale``
    int32[n] is scratch. A row's table is zero beyond its blocks, always. ``num_rows`` is the high-water mark (rows
    below it may be empty). ``dirty`` says that rows came, went or sat out since the last build, so that the next one
    must arrange them.
    """

    def __init__(self, state, stale, table, length_t block_size, slot_t num_blocks):
        cdef length_t[:, ::1] rows = state
        cdef length_t[::1] scratch = stale
        cdef block_id_t[:, ::1] ids = table
        self._keep = state, stale, table
        self.rows = Rows(&rows[0, 0], &rows[1, 0], &rows[2, 0], &rows[3, 0], &scratch[0], &ids[0, 0],
                         <length_t> ids.shape[1], block_size_of(block_size))
        self.capacity, self.width = <length_t> ids.shape[0], <length_t> ids.shape[1]
        self.num_blocks = num_blocks
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

    def start(self, length_t row, length_t num_computed):
        """A row begins: no blocks, num_computed tokens in the cache."""
        self.rows.num_computed[row] = num_computed
        self.rows.num_blocks[row] = self.rows.block[row] = 0
        self.rows.column[row] = -1

    def append(self, length_t row, ids):
        """Appends block ids to a row: how many, or -1 where one is bad or the row too short; then nothing changed."""
        cdef length_t held = self.rows.num_blocks[row], room = self.width - held
        cdef block_id_t* tail = self.rows.table + <slot_t> row * self.width + held
        cdef slot_t count = -1
        try:
            count = read_ids(readable(ids), tail, room, self.num_blocks)
        finally:
            if count < 0:
                memset(tail, 0, room * sizeof(block_id_t))
        if count < 0:
            return -1
        self.rows.num_blocks[row] = held + <length_t> count
        return count

    def truncate(self, length_t row, length_t num_blocks):
        """Keeps a row's first num_blocks ids."""
        cdef block_id_t* ids = self.rows.table + <slot_t> row * self.width
        memset(ids + num_blocks, 0, (self.rows.num_blocks[row] - num_blocks) * sizeof(block_id_t))
        self.rows.num_blocks[row] = num_blocks
        if self.rows.column[row] >= num_blocks:
            self.rows.column[row] = -1

    def set_computed(self, length_t row, length_t num_computed):
        self.rows.num_computed[row] = num_computed

    def needs_block(self, length_t[::1] out):
        """Rows whose next token has no block (but could have one), into out; how many."""
        cdef length_t i, column, count = 0
        for i in range(self.num_rows):
            column = column_of(self.rows.num_computed[i], self.rows.size)
            if self.rows.num_blocks[i] <= column < self.width:
                out[count] = i
                count += 1
        return count


cdef inline int kind_of(length_t query_len) noexcept nogil:
    return DECODE if query_len == 1 else (PREFILL if query_len else REST)


cdef inline void exchange(Rows* rows, length_t* query_lens, length_t i, length_t j, length_t* swaps,
                          length_t* count) noexcept nogil:
    swap_rows(rows, i, j)
    exchange_lengths(query_lens, i, j)
    swaps[2 * count[0]] = i
    swaps[2 * count[0] + 1] = j
    count[0] += 1


cdef void arrange_rows(Rows* rows, length_t* query_lens, length_t n, length_t* swaps, length_t* count,
                       length_t* num_decodes, length_t* num_reqs) noexcept nogil:
    # Regions 0, 1, 2 hold kinds 0, 1, 2 at the end. A row in region a of kind b and one in b of kind a take one swap;
    # what is left then goes round three regions and takes two. No fewer will do.
    cdef length_t bounds[4]
    cdef length_t i, j, k
    cdef int a, b, c
    bounds[0] = bounds[1] = bounds[2] = 0
    bounds[3] = n
    for i in range(n):
        bounds[1] += kind_of(query_lens[i]) == DECODE
        bounds[2] += kind_of(query_lens[i]) != REST
    num_decodes[0], num_reqs[0] = bounds[1], bounds[2]
    for a in range(2):
        for b in range(a + 1, 3):
            j = bounds[b]
            for i in range(bounds[a], bounds[a + 1]):
                if kind_of(query_lens[i]) != b:
                    continue
                while j < bounds[b + 1] and kind_of(query_lens[j]) != a:
                    j += 1
                if j == bounds[b + 1]:
                    break
                exchange(rows, query_lens, i, j, swaps, count)
    j = k = -1  # what is left goes round one way only: both searches run on
    for i in range(bounds[1]):
        b = kind_of(query_lens[i])
        if b == DECODE:
            continue
        c = 3 - b
        j = bounds[b] if j < 0 else j
        while kind_of(query_lens[j]) != c:
            j += 1
        k = bounds[c] if k < 0 else k
        while kind_of(query_lens[k]) != DECODE:
            k += 1
        exchange(rows, query_lens, i, j, swaps, count)
        exchange(rows, query_lens, i, k, swaps, count)


@cython.final
cdef class StepArena:
    """The outputs of one step: arrays of one arena of the ring (by name, see builder/staging.py), and its counts."""

    def __init__(self, dict fields):
        cdef length_t[::1] lengths
        cdef slot_t[::1] slots
        self._keep = fields
        slots = fields["slot_mapping"]
        self.slot_mapping = &slots[0]
        slots = fields["positions"]
        self.positions = &slots[0]
        lengths = fields["token_to_req_indices"]
        self.token_to_req_indices = &lengths[0]
        lengths = fields["query_start_loc"]
        self.query_start_loc = &lengths[0]
        lengths = fields["seq_start_loc"]
        self.seq_start_loc = &lengths[0]
        lengths = fields["seq_lens"]
        self.seq_lens = &lengths[0]
        lengths = fields["context_lens"]
        self.context_lens = &lengths[0]
        lengths = fields["query_lens"]
        self.query_lens = &lengths[0]
        lengths = fields["logits_indices"]
        self.logits_indices = &lengths[0]
        lengths = fields["last_blocks"]
        self.last_blocks = &lengths[0]
        lengths = fields["paged_kv_indptr"]
        self.paged_kv_indptr = &lengths[0]
        lengths = fields["paged_kv_last_page_len"]
        self.paged_kv_last_page_len = &lengths[0]
        lengths = fields["prefill_query_start_loc"]
        self.prefill_query_start_loc = &lengths[0]
        lengths = fields["prefill_seq_start_loc"]
        self.prefill_seq_start_loc = &lengths[0]
        self.query_start_loc[0] = self.seq_start_loc[0] = self.paged_kv_indptr[0] = 0
        self.counting = 0
        self.step = -1
        self.req_ids = self.moves = ()


@cython.final
cdef class StepKernel:
    """Builds a step into the next arena. ``metadata[k]`` is what a step in arena k answers with.

    ``query_lens`` int32[capacity] is where the caller writes who runs how much (0: not in this step) before ``check``;
    ``swaps`` int32[capacity, 2] is where ``arrange`` writes what it moved.
    """

    def __init__(self, BlockRows rows, list arenas, list metadata, query_lens, swaps, length_t max_model_len,
                 length_t max_num_tokens):
        cdef length_t[::1] lens = query_lens
        cdef length_t[:, ::1] pairs = swaps
        self.rows = rows
        self.arenas, self.metadata = arenas, metadata
        self._keep = query_lens, swaps
        self.query_lens, self.swaps = &lens[0], &pairs[0, 0]
        self.depth = len(arenas)
        self.max_model_len, self.max_num_tokens = max_model_len, max_num_tokens
        self.next_step = 0

    def decode_step(self):
        """Every row runs one token: the metadata, or None where rows must be arranged or something is wrong."""
        return None if self.rows.busy else self.decode_step_inside()

    cpdef object decode_step_inside(self):
        """The same, for the caller that has entered the batch."""
        cdef BlockRows rows = self.rows
        if rows.dirty or rows.num_rows > self.max_num_tokens:
            return None
        if not decodes_fit(&rows.rows, rows.num_rows, self.max_model_len):
            return None
        return self._run(rows.num_rows, rows.num_rows)

    def schedule_all(self):
        """Writes query_lens: one token a row."""
        repeat(self.query_lens, 1, self.rows.num_rows)

    def check(self):
        """The checking pass over query_lens: (code, row, token)."""
        cdef length_t row = 0, token = 0
        cdef length_t code = check_rows(&self.rows.rows, self.rows.num_rows, self.query_lens, self.max_model_len,
                                        self.max_num_tokens, &row, &token)
        return code, row, token

    def arrange(self):
        """Orders rows and query_lens: decodes (1 token), prefills (more), rest (0), by the fewest swaps.

        Answers (number of swaps, decodes, decodes and prefills).
        """
        cdef length_t count = 0, num_decodes = 0, num_reqs = 0
        arrange_rows(&self.rows.rows, self.query_lens, self.rows.num_rows, self.swaps, &count, &num_decodes, &num_reqs)
        return count, num_decodes, num_reqs

    def step(self, length_t num_decodes, length_t num_reqs):
        """The mutating pass over arranged and checked rows; the metadata. The caller sets the arena's moves."""
        cdef BlockRows rows = self.rows
        cdef length_t i
        for i in range(num_decodes):
            cache_block(&rows.rows, i, column_of(rows.rows.num_computed[i], rows.rows.size))
        return self._run(num_decodes, num_reqs)

    def undo(self, length_t num_swaps):
        """Takes the last step back: its tokens, its number, and its num_swaps swaps, the last one first."""
        cdef StepArena out
        cdef length_t i
        self.next_step -= 1
        out = <StepArena> PyList_GET_ITEM(self.arenas, <Py_ssize_t> (self.next_step % self.depth))
        for i in range(out.num_reqs):
            self.rows.rows.num_computed[i] -= 1 if i < out.num_decodes else self.query_lens[i]
        while num_swaps:
            num_swaps -= 1
            swap_rows(&self.rows.rows, self.swaps[2 * num_swaps], self.swaps[2 * num_swaps + 1])

    cdef object _run(self, length_t num_decodes, length_t num_reqs):
        cdef Py_ssize_t k = <Py_ssize_t> (self.next_step % self.depth)
        cdef StepArena out = <StepArena> PyList_GET_ITEM(self.arenas, k)
        cdef BlockRows rows = self.rows
        cdef object metadata = <object> PyList_GET_ITEM(self.metadata, k)
        cdef length_t num_tokens = out.num_tokens, old_num_reqs = out.num_reqs
        fill_decodes(out, &rows.rows, num_decodes)
        start_counting(out, num_decodes)
        out.max_query_len = 1 if num_decodes else 0
        out.max_prefill_seq_len = 0
        if num_decodes < num_reqs:
            fill_prefills(out, &rows.rows, num_decodes, num_reqs, self.query_lens)
        out.num_decodes = num_decodes
        out.num_reqs = num_reqs
        out.num_prefills = num_reqs - num_decodes
        out.num_prefill_tokens = out.num_tokens - num_decodes
        out.max_seq_len = out.max_decode_seq_len
        if out.max_prefill_seq_len > out.max_seq_len:
            out.max_seq_len = out.max_prefill_seq_len
        out.step = self.next_step
        out.req_ids = rows.req_ids
        out.changes = rows.changes
        out.moves = ()
        self.next_step += 1
        if out.num_tokens != num_tokens or out.num_reqs != old_num_reqs:
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
