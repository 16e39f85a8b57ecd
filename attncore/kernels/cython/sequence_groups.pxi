# GroupReader: reads the sequences of a step of the list builder.

cimport cython
from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdlib cimport free, malloc, realloc


@cython.final
cdef class GroupReader(Entrance):
    """Reads one step of the list builder into scratch of its own, checks it, and fills the caller's arrays."""

    cdef Entry* entries
    cdef Py_ssize_t capacity
    cdef block_id_t* ids
    cdef slot_t ids_capacity
    cdef readonly slot_t num_ids
    cdef readonly length_t num_seqs
    cdef readonly Py_ssize_t encoder_group  # the first group with an encoder_seq_len, or -1
    cdef readonly Py_ssize_t placeholder_group  # the first group with placeholders, or -1
    cdef length_t block_size
    cdef length_t window

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

    def read(self, groups):
        """Reads SequenceGroups (is_prompt, sequences, prefix_cache_hit): False where something is malformed."""
        cdef object group, sequence, sequences, is_prompt, hit
        cdef length_t first
        cdef Py_ssize_t index = -1
        self.num_seqs = 0
        self.num_ids = 0
        self.encoder_group = -1
        self.placeholder_group = -1
        for group in groups:
            index += 1
            # Groups and sequences are named tuples: their items are read from the tuple, not through an attribute.
            if not isinstance(group, tuple) or PyTuple_GET_SIZE(group) < 3:
                return False
            if (self.encoder_group < 0 and PyTuple_GET_SIZE(group) > 3
                    and <object> PyTuple_GET_ITEM(group, 3) is not None):
                self.encoder_group = index
            if (self.placeholder_group < 0 and PyTuple_GET_SIZE(group) > 5
                    and <object> PyTuple_GET_ITEM(group, 5) is not None):
                self.placeholder_group = index
            first = self.num_seqs
            is_prompt = <object> PyTuple_GET_ITEM(group, 0)
            sequences = <object> PyTuple_GET_ITEM(group, 1)
            hit = <object> PyTuple_GET_ITEM(group, 2)
            if type(is_prompt) is not bool or type(hit) is not bool:
                return False
            if type(sequences) is not list:
                # A subclass may lie about its length: what it holds is read.
                if isinstance(sequences, list):
                    sequences = list(list.__iter__(sequences))
                elif isinstance(sequences, tuple):
                    sequences = list(tuple.__iter__(sequences))
                else:
                    return False
            for sequence in <list> sequences:
                if self._read_sequence(sequence, is_prompt is True, hit is True) == 0:
                    return False
            if self.num_seqs == first:
                return False
            if not self._told_apart(first):
                return False
            if first and is_prompt is True and not self.entries[first - 1].is_prompt:
                return False
        return self.num_seqs > 0

    cdef bint _told_apart(self, length_t first) except -1:
        """Whether the sequences from ``first`` on have ids of their own, and all of them have blocks or none.

        The numbers that were read are compared: an object may hash as it likes, or not at all.
        """
        cdef length_t i
        cdef bint ascending = True
        for i in range(first + 1, self.num_seqs):
            if (self.entries[i].num_ids < 0) != (self.entries[first].num_ids < 0):
                return False
            ascending &= self.entries[i - 1].seq_id < self.entries[i].seq_id
        return ascending or len({self.entries[i].seq_id for i in range(first, self.num_seqs)}) == self.num_seqs - first

    cdef int _read_sequence(self, object sequence, bint is_prompt, bint hit) except -1:
        cdef slot_t seq_id = 0, query_len = 0, context_len = 0, count = -1
        cdef object ids
        cdef Entry* entry
        cdef Py_buffer buffer
        if not isinstance(sequence, tuple) or PyTuple_GET_SIZE(sequence) < 4:
            return 0
        if (read_int(<PyObject*> PyTuple_GET_ITEM(sequence, 0), &seq_id) == 0
                or read_int(<PyObject*> PyTuple_GET_ITEM(sequence, 1), &query_len) == 0
                or read_int(<PyObject*> PyTuple_GET_ITEM(sequence, 2), &context_len) == 0):
            return 0
        if query_len < 1 or context_len < 0 or query_len > MAX_INT32 or context_len > MAX_INT32 - query_len:
            return 0
        ids = <object> PyTuple_GET_ITEM(sequence, 3)
        if ids is not None:
            if open_array(ids, &buffer):
                try:
                    count = self._read_array(&buffer)
                finally:
                    PyBuffer_Release(&buffer)
            else:
                ids = readable(ids)
                if ids is None or len(ids) > MAX_INT32:
                    return 0
                self._reserve_ids(len(ids))
                count = read_ids(ids, self.ids + self.num_ids, self.ids_capacity - self.num_ids,
                                 <slot_t> MAX_INT32 + 1)
            if count < 0:
                return 0
        self._reserve_entries()
        entry = self.entries + self.num_seqs
        entry.seq_id, entry.first_id, entry.num_ids = seq_id, self.num_ids, <length_t> count
        entry.query_len, entry.context_len = <length_t> query_len, <length_t> context_len
        entry.is_prompt, entry.hit = is_prompt, hit
        if count > 0:
            self.num_ids += count
        self.num_seqs += 1
        return 1

    cdef slot_t _read_array(self, const Py_buffer* buffer) except -3:
        """Copies the ids of an open array: the count, or -1 where one is bad or there are too many."""
        cdef slot_t count = buffer.shape[0]
        if count > MAX_INT32:
            return -1
        self._reserve_ids(count)
        return copy_ids(buffer, self.ids + self.num_ids, count, <slot_t> MAX_INT32 + 1)

    def measure(self, length_t block_size, length_t window, bint chunked_prefill, bint hit_anywhere,
                bint multi_token_decode):
        """Checks what was read and settles each sequence's kernel length and ids (window 0: none).

        Returns a tuple (code, row, token, num_tokens, num_seq_tokens, num_prefills, num_prefill_tokens, widest row,
        pages, max_query_len, max_prefill_seq_len, max_decode_seq_len, max_decode_query_len, longest kernel length);
        row and token belong to a code that is not OK. ``fill`` and ``fill_pages`` write by the same block size and
        window: the caller's may have changed since.
        """
        cdef Failure failure = Failure(0, 0, 0)
        cdef GroupTotals totals
        cdef length_t code
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        if window < 0:
            raise ValueError(f"window: {window} is below 0")
        self.block_size, self.window = block_size, window
        code = settle_entries(self.entries, self.num_seqs, block_size, window, chunked_prefill, hit_anywhere,
                              multi_token_decode, &failure)
        if code != OK:
            return code, failure.row, failure.token, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
        totals = count_entries(self.entries, self.num_seqs, block_size)
        if totals.num_tokens > MAX_INT32 or totals.num_seq_tokens > MAX_INT32 or totals.pages > MAX_INT32:
            code = TOO_MANY_SEQ_TOKENS
        return (code, 0, 0, totals.num_tokens, totals.num_seq_tokens, totals.num_prefills, totals.num_prefill_tokens,
                totals.width, totals.pages, totals.max_query_len, totals.max_prefill_seq_len,
                totals.max_decode_seq_len, totals.max_decode_query_len, totals.longest)

    def fill(self, length_t pad, slot_t[::1] slot_mapping, slot_t[::1] positions, length_t[::1] token_to_req_indices,
             length_t[::1] seq_lens, length_t[::1] context_lens, length_t[::1] query_lens,
             length_t[::1] query_start_loc, length_t[::1] seq_start_loc, length_t[::1] logits_indices):
        """Fills the arrays that every dialect has; ``pad`` rows of one token behind them are a graph's."""
        fill_entries(self.entries, self.num_seqs, self.ids, block_size_of(self.block_size), self.window, slot_mapping,
                     positions, token_to_req_indices, seq_lens, context_lens, query_lens, query_start_loc,
                     seq_start_loc, logits_indices)
        pad_entries(self.num_seqs, pad, slot_mapping, positions, token_to_req_indices, seq_lens, query_start_loc,
                    seq_start_loc)

    def fill_table(self, block_id_t[:, :] table):
        """Fills int32[rows, width] (rows contiguous), rows beyond the sequences and every tail with 0."""
        check_columns(table.shape[1], table.strides[1])
        fill_entry_rows(self.entries, self.num_seqs, self.ids, table)

    def fill_pages(self, length_t[::1] indptr, block_id_t[::1] indices, length_t[::1] last_page_len):
        """Fills the page lists of every sequence; requests beyond them are empty."""
        fill_entry_pages(self.entries, self.num_seqs, self.ids, self.block_size, indptr, indices, last_page_len)
