# AdoptedRows: the host arrays and counts of a step whose lengths an engine gives.

cimport cython
from libc.string cimport memcpy


cdef struct AdoptedCounts:
    length_t num_rows           # rows that the engine gave
    length_t num_actual_reqs    # rows up to the last one with tokens
    length_t num_tokens         # of all rows
    length_t max_query_len
    length_t num_decodes, num_decode_tokens
    length_t max_decode_query_len, max_decode_seq_len, max_prefill_seq_len
    bint one_length             # whether the first rows run max_query_len tokens each, and the others none


cdef inline length_t pages_of(length_t seq_len, BlockSize size) noexcept nogil:
    return column_of(seq_len - 1, size) + 1 if seq_len else 0


cdef void copy_lengths(length_t* out, const length_t[:] given, length_t count) noexcept:
    """The first ``count`` of ``given``, which may have gaps between them, to ``out``."""
    cdef length_t i
    if count and given.strides[0] == sizeof(length_t):
        memcpy(out, &given[0], <size_t> count * sizeof(length_t))
        return
    for i in range(count):
        out[i] = given[i]


cdef length_t check_starts(const length_t* starts, length_t count, slot_t num_slots, slot_t max_num_tokens,
                           length_t* row) noexcept nogil:
    """Whether ``starts`` are prefix sums of ``count`` rows' tokens, which have slots: a code, and where it failed."""
    cdef length_t i
    cdef bint falls = False
    row[0] = 0
    if starts[0] != 0:
        return STARTS_NOT_AT_0
    for i in range(count):  # without a branch: several at once
        falls |= starts[i + 1] < starts[i]
    for i in range(count if falls else 0):
        row[0] = i
        if starts[i + 1] < starts[i]:
            return STARTS_FALL
    row[0] = max(count - 1, 0)
    if starts[count] > max_num_tokens:
        return TOO_MANY_TOKENS
    return TOO_FEW_SLOTS if starts[count] > num_slots else OK


cdef length_t check_lengths(const length_t* starts, const length_t* lengths, length_t count, slot_t max_model_len,
                            slot_t most, length_t pad_seq_len, length_t* row) noexcept nogil:
    """Whether each row's keys hold its tokens, and the table's ``most`` tokens hold its keys: a code, and the row."""
    cdef length_t i, limit = <length_t> min(max_model_len, most, <slot_t> MAX_INT32)
    cdef slot_t total = <slot_t> count * pad_seq_len
    cdef bint wrong = False
    for i in range(count):  # without a branch: several at once
        wrong |= (lengths[i] < starts[i + 1] - starts[i]) | (lengths[i] > limit)
        total += lengths[i]
    for i in range(count if wrong else 0):
        row[0] = i
        if lengths[i] < starts[i + 1] - starts[i]:
            return TOO_SHORT
        if lengths[i] > max_model_len:
            return TOO_LONG
        if lengths[i] > most:
            return BEYOND_TABLE
    row[0] = max(count - 1, 0)
    return TOO_MANY_SEQ_TOKENS if total > MAX_INT32 else OK


cdef void count_rows(const length_t* starts, length_t count, length_t decode_threshold,
                     AdoptedCounts* counts) noexcept nogil:
    """The rows with tokens, and the leading ones of them that are decodes."""
    cdef length_t i, first = starts[1] if count else 0, alike = 0, query_len, shorter = 0
    if first:
        while alike < count and starts[alike + 1] - starts[alike] == first:
            alike += 1
    counts.num_rows, counts.num_tokens = count, starts[count]
    counts.max_query_len, counts.num_actual_reqs = first, alike
    counts.num_decodes = alike if first <= decode_threshold else 0
    counts.max_decode_query_len = first if counts.num_decodes else 0
    counts.one_length = True
    for i in range(alike, count):  # the leading rows of one length are counted
        query_len = starts[i + 1] - starts[i]
        if query_len == 0:
            shorter = 1
            continue
        counts.one_length = counts.one_length and not shorter and (i == 0 or query_len == counts.max_query_len)
        counts.max_query_len = max(counts.max_query_len, query_len)
        counts.num_actual_reqs = i + 1
        if query_len <= decode_threshold and counts.num_decodes == i:
            counts.num_decodes = i + 1
            counts.max_decode_query_len = max(counts.max_decode_query_len, query_len)
    counts.num_decode_tokens = starts[counts.num_decodes]


cdef void longest_keys(const length_t* lengths, length_t num_rows, slot_t most, AdoptedCounts* counts) noexcept nogil:
    """The longest row of decodes and of prefills among ``num_rows``; ``most`` where no lengths are known."""
    cdef length_t i, longest_decode = 0, longest_prefill = 0
    if lengths == NULL:
        counts.max_decode_seq_len = <length_t> most if counts.num_decodes else 0
        counts.max_prefill_seq_len = <length_t> most if num_rows > counts.num_decodes else 0
        return
    for i in range(counts.num_decodes):
        longest_decode = max(longest_decode, lengths[i])
    for i in range(counts.num_decodes, num_rows):
        longest_prefill = max(longest_prefill, lengths[i])
    counts.max_decode_seq_len, counts.max_prefill_seq_len = longest_decode, longest_prefill


cdef void fill_starts(const length_t* starts, length_t num_rows, length_t* query_start_loc, length_t* query_lens,
                      length_t* logits_indices) noexcept nogil:
    """The arrays that follow from where the rows' tokens start."""
    cdef length_t i, query_len
    memcpy(query_start_loc, starts, (<size_t> num_rows + 1) * sizeof(length_t))
    for i in range(num_rows):
        query_len = starts[i + 1] - starts[i]
        query_lens[i] = query_len
        logits_indices[i] = starts[i + 1] - 1 if query_len else 0


cdef void fill_lengths(const length_t* lengths, const length_t* query_lens, length_t num_rows, BlockSize size,
                       length_t* seq_lens, length_t* context_lens, length_t* seq_start_loc, length_t* indptr,
                       length_t* last_page_len) noexcept nogil:
    """The arrays that follow from the rows' lengths; a row without tokens has no context."""
    cdef length_t i, pages, seq_len, sum_of_keys = 0, sum_of_pages = 0
    seq_start_loc[0] = indptr[0] = 0
    memcpy(seq_lens, lengths, <size_t> num_rows * sizeof(length_t))
    for i in range(num_rows):
        context_lens[i] = lengths[i] - query_lens[i] if query_lens[i] else 0
    for i in range(num_rows):
        seq_len = lengths[i]
        pages = pages_of(seq_len, size)
        sum_of_keys += seq_len
        sum_of_pages += pages
        seq_start_loc[i + 1], indptr[i + 1] = sum_of_keys, sum_of_pages
        last_page_len[i] = seq_len - (pages - 1) * size.tokens if pages else 0


cdef enum:
    NUM_COUNTS = 14
    NUM_REQS = 0            # places in COUNT_NAMES
    NUM_TOKENS = 1
    MAX_SEQ_LEN = 7
    USE_CUDA_GRAPH = NUM_COUNTS - 1

cdef tuple COUNT_NAMES = (
    "num_reqs", "num_tokens", "num_decodes", "num_decode_tokens", "num_prefills", "num_prefill_tokens",
    "max_query_len", "max_seq_len", "max_prefill_seq_len", "max_decode_seq_len", "max_decode_query_len",
    "num_actual_reqs", "num_actual_tokens", "use_cuda_graph",
)


cdef void count_step(AdoptedCounts* counts, length_t num_rows, bint padded, length_t captured_query_len,
                     slot_t largest, length_t* out) noexcept nogil:
    """The counts in the order of COUNT_NAMES; ``largest``, where not 0, is the longest that a row may be."""
    cdef length_t num_prefills = num_rows - counts.num_decodes if not padded else 0
    cdef length_t num_tokens = num_rows * captured_query_len if padded else counts.num_tokens
    cdef length_t num_decode_tokens = num_tokens if padded else counts.num_decode_tokens
    cdef length_t longest_decode = counts.max_decode_seq_len, longest_prefill = counts.max_prefill_seq_len
    cdef length_t max_query_len = counts.max_query_len
    if padded:  # padded rows are behind the decodes, and have what length the engine gives them
        longest_decode, longest_prefill = max(longest_decode, longest_prefill), 0
    if largest:
        longest_decode, max_query_len = <length_t> largest, captured_query_len
    out[0], out[1], out[2], out[3] = num_rows, num_tokens, counts.num_decodes, num_decode_tokens
    out[4], out[5], out[6] = num_prefills, num_tokens - num_decode_tokens, max_query_len
    out[7], out[8], out[9] = max(longest_decode, longest_prefill), longest_prefill, longest_decode
    out[10] = captured_query_len if padded else max(counts.max_decode_query_len, 1)
    out[11], out[12], out[13] = counts.num_actual_reqs, counts.num_tokens, padded


cdef dict named_counts(const length_t* counts):
    """The counts as metadata names them."""
    cdef dict named = {}
    cdef Py_ssize_t i
    for i in range(NUM_COUNTS - 1):
        named[COUNT_NAMES[i]] = counts[i]
    named["use_cuda_graph"] = counts[NUM_COUNTS - 1] != 0
    return named


@cython.final
cdef class AdoptedRows:
    """Copies an engine's host lengths, checks the copies, and fills a step's host arrays from them.

    ``fields`` are the arrays of steps of up to ``max_num_reqs`` rows, by name; ``pad_seq_len`` is the least that a row
    of a captured size has for a length. The engine's arrays may change at any
    time, and say anything: nothing is written before the copies are right, and nothing outside the fields.
    """

    cdef object _keep
    cdef length_t* query_start_loc
    cdef length_t* query_lens
    cdef length_t* logits_indices
    cdef length_t* seq_lens
    cdef length_t* context_lens
    cdef length_t* seq_start_loc
    cdef length_t* indptr
    cdef length_t* last_page_len
    cdef length_t* starts       # the copies
    cdef length_t* lengths
    cdef length_t block_size, max_num_reqs, max_num_tokens, max_model_len, decode_threshold, pad_seq_len

    def __init__(self, dict fields, length_t max_num_reqs, length_t max_num_tokens, length_t block_size,
                 length_t max_model_len, length_t decode_threshold, length_t pad_seq_len):
        self._keep = fields
        self.query_start_loc = lengths_of(fields, "query_start_loc", <Py_ssize_t> max_num_reqs + 1)
        self.query_lens = lengths_of(fields, "query_lens", max_num_reqs)
        self.logits_indices = lengths_of(fields, "logits_indices", max_num_reqs)
        self.seq_lens = lengths_of(fields, "seq_lens", max_num_reqs)
        self.context_lens = lengths_of(fields, "context_lens", max_num_reqs)
        self.seq_start_loc = lengths_of(fields, "seq_start_loc", <Py_ssize_t> max_num_reqs + 1)
        self.indptr = lengths_of(fields, "paged_kv_indptr", <Py_ssize_t> max_num_reqs + 1)
        self.last_page_len = lengths_of(fields, "paged_kv_last_page_len", max_num_reqs)
        self.starts = lengths_of(fields, "_starts", <Py_ssize_t> max_num_reqs + 1)
        self.lengths = lengths_of(fields, "_lengths", max_num_reqs)
        self.block_size, self.max_num_reqs, self.max_num_tokens = block_size, max_num_reqs, max_num_tokens
        self.max_model_len, self.decode_threshold, self.pad_seq_len = max_model_len, decode_threshold, pad_seq_len

    def fill(self, starts, lengths, slot_t num_slots, slot_t columns, length_t captured_query_len, bint uniform,
             bint capturing):
        """Fills the arrays; the step's counts by name, or (code, row) of what is wrong, where nothing is written.

        ``starts`` int32[n + 1] and ``lengths`` int32[n] (None: not known) are the engine's, of n rows; it has
        ``num_slots`` slots and a table of ``columns``. ``captured_query_len``: the tokens of each row of the captured
        size of n rows, 0 where there is none; ``uniform``: whether its rows must run that many. ``capturing``: lengths
        are the largest possible.
        """
        cdef const length_t[:] given = starts
        cdef const length_t[:] given_lengths
        cdef length_t code, row = 0, count
        cdef length_t counts[NUM_COUNTS]
        if given.shape[0] < 1 or given.shape[0] - 1 > self.max_num_reqs:
            return TOO_MANY_ROWS, 0
        count = <length_t> given.shape[0] - 1
        copy_lengths(self.starts, given, count + 1)
        if lengths is not None:
            given_lengths = lengths
            if given_lengths.shape[0] == count:
                copy_lengths(self.lengths, given_lengths, count)
            else:  # what is wrong with the starts is said first
                code = check_starts(self.starts, count, num_slots, self.max_num_tokens, &row)
                if code != OK:
                    return code, row
                return TOO_MANY_ROWS, count
        code = self.count_copies(count, lengths is not None, num_slots, columns, captured_query_len, uniform,
                                 capturing, counts, &row)
        if code != OK:
            return code, row
        self.fill_copies(counts[NUM_REQS], lengths is not None)
        return named_counts(counts)

    def fill_counted(self, length_t num_rows, bint has_lengths):
        """Fills the arrays of a step that KnownSteps has counted, of so many rows: its copies are here still."""
        if 0 <= num_rows <= self.max_num_reqs:
            self.fill_copies(num_rows, has_lengths)

    cdef length_t count_copies(self, length_t count, bint has_lengths, slot_t num_slots, slot_t columns,
                               length_t captured_query_len, bint uniform, bint capturing, length_t* out,
                               length_t* row) noexcept nogil:
        """Checks what has been copied to ``starts`` and ``lengths``, as ``fill`` does: a code; counts, or the row."""
        cdef length_t i, code, num_rows
        cdef const length_t* known = self.lengths if has_lengths else NULL
        cdef slot_t most = min(columns, MAX_INT32 // self.block_size) * self.block_size
        cdef AdoptedCounts counts
        cdef bint padded
        row[0] = 0
        code = check_starts(self.starts, count, num_slots, self.max_num_tokens, row)
        if code == OK and has_lengths:
            code = check_lengths(self.starts, known, count, self.max_model_len, most, self.pad_seq_len, row)
        if code != OK:
            return code
        most = min(most, <slot_t> self.max_model_len)
        count_rows(self.starts, count, self.decode_threshold, &counts)
        padded = (captured_query_len and num_slots == <slot_t> count * captured_query_len
                  and counts.max_query_len <= captured_query_len
                  and ((not uniform and captured_query_len > 1)  # of one token a row, token i is of row i
                       or (counts.one_length and (counts.max_query_len == 0
                                                  or counts.max_query_len == captured_query_len))))
        row[0] = 0
        if padded:
            counts.num_decodes = counts.num_actual_reqs
        elif capturing:
            return QUERY_NOT_CAPTURED
        elif (captured_query_len and counts.num_actual_reqs < count and counts.max_query_len <= captured_query_len
                and num_slots < <slot_t> count * captured_query_len):
            row[0] = count
            return SLOTS_NOT_PADDED
        if padded and most < self.pad_seq_len:
            return BEYOND_TABLE
        num_rows = count if padded else counts.num_actual_reqs
        for i in range(count if padded else 0):  # padded rows are lent the keys that the backend's must have
            self.lengths[i] = max(self.lengths[i], self.pad_seq_len)
        longest_keys(known, num_rows, most, &counts)
        count_step(&counts, num_rows, padded, captured_query_len, most if capturing else 0, out)
        return OK

    cdef void fill_copies(self, length_t num_rows, bint has_lengths) noexcept nogil:
        """Fills the arrays from the copies, which are right."""
        fill_starts(self.starts, num_rows, self.query_start_loc, self.query_lens, self.logits_indices)
        if has_lengths:
            fill_lengths(self.lengths, self.query_lens, num_rows, block_size_of(self.block_size), self.seq_lens,
                         self.context_lens, self.seq_start_loc, self.indptr, self.last_page_len)
