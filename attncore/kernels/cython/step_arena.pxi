# StepArena: the arrays and counts of one step.

cimport cython


# The arrays of a step that each KV-cache group has of its own.
cdef struct GroupFields:
    slot_t* slot_mapping
    length_t* paged_kv_indptr
    length_t* paged_kv_last_page_len
    length_t num_pages
    bint shares_pages       # an earlier group, of the same block size, fills the page lists


cdef void check_length(str name, Py_ssize_t length, Py_ssize_t least) except *:
    if length < least:
        raise ValueError(f"{name}: {length} elements, and a step of this arena writes {least}")


cdef length_t* lengths_of(dict fields, str name, Py_ssize_t least) except NULL:
    cdef length_t[::1] view = fields[name]
    check_length(name, view.shape[0], least)
    return &view[0]


cdef slot_t no_slots  # where the pointer of an empty array points: a captured size has no slots of encoder tokens


cdef slot_t* slots_of(dict fields, str name, Py_ssize_t least) except NULL:
    cdef slot_t[::1] view = fields[name]
    check_length(name, view.shape[0], least)
    return &view[0] if view.shape[0] else &no_slots


@cython.final
cdef class StepArena:
    """The outputs of one step: arrays of one arena of the ring (by name, see builder/device/arena.py), and its counts.

    ``capacity`` is what the arrays hold, of which each is checked: tokens, requests and encoder tokens.
    ``groups`` has the arrays of each KV-cache group, the cross group's last. Groups whose page lists are the same
    arrays as an earlier group's have blocks of one size: they are filled once.
    """

    cdef object _keep
    cdef GroupFields groups[MAX_GROUPS + 1]
    cdef slot_t* positions
    cdef length_t* token_to_req_indices
    cdef length_t* query_start_loc
    cdef length_t* seq_start_loc
    cdef length_t* seq_lens
    cdef length_t* context_lens
    cdef length_t* query_lens
    cdef length_t* logits_indices
    cdef length_t* prefill_query_start_loc
    cdef length_t* prefill_seq_start_loc
    cdef length_t* encoder_seq_lens
    cdef length_t* encoder_query_lens
    cdef length_t* encoder_seq_start_loc
    cdef length_t* encoder_query_start_loc
    cdef length_t counting      # leading rows whose query_start_loc, logits_indices, ... already count 0, 1, 2, ...
    cdef slot_t version         # of the rows whose encoder fields are there
    cdef length_t encoder_reqs  # how many rows those are
    cdef length_t num_ones      # leading rows of the step that ran one token
    cdef readonly slot_t step
    cdef readonly length_t num_reqs, num_tokens, num_actual_reqs, num_actual_tokens
    cdef readonly length_t num_decodes, num_decode_tokens, num_prefills, num_prefill_tokens
    cdef readonly length_t max_query_len, max_seq_len, max_prefill_seq_len, max_decode_seq_len, max_decode_query_len
    cdef length_t max_prefill_query_len
    cdef readonly length_t num_encoder_tokens, max_encoder_seq_len, num_cross_slots
    cdef length_t num_seq_tokens, max_reqs, max_tokens, max_cross_slots
    cdef readonly slot_t changes
    cdef readonly object req_ids
    cdef public object moves
    cdef ColumnOut columns[MAX_COLUMNS]
    cdef length_t num_columns
    cdef list _columns
    cdef public tuple views     # (mapping, names): the arrays of a step that are cached, until it has other counts

    def __init__(self, dict fields, list groups, capacity, bint has_cross):
        cdef dict group, other
        cdef GroupFields* out
        cdef length_t g, h
        if len(groups) > MAX_GROUPS + 1:
            raise ValueError(f"groups: {len(groups)} are more than the kernels take")
        cdef Py_ssize_t tokens, reqs, encoder_tokens
        cdef Py_ssize_t cross = len(groups) - 1 if has_cross else len(groups)
        tokens, reqs, encoder_tokens = capacity
        self._keep = fields, groups
        self.positions = slots_of(fields, "positions", tokens)
        self.token_to_req_indices = lengths_of(fields, "token_to_req_indices", tokens)
        self.query_start_loc = lengths_of(fields, "query_start_loc", reqs + 1)
        self.seq_start_loc = lengths_of(fields, "seq_start_loc", reqs + 1)
        self.seq_lens = lengths_of(fields, "seq_lens", reqs)
        self.context_lens = lengths_of(fields, "context_lens", reqs)
        self.query_lens = lengths_of(fields, "query_lens", reqs)
        self.logits_indices = lengths_of(fields, "logits_indices", reqs)
        self.prefill_query_start_loc = lengths_of(fields, "prefill_query_start_loc", reqs + 1)
        self.prefill_seq_start_loc = lengths_of(fields, "prefill_seq_start_loc", reqs + 1)
        if has_cross:
            self.encoder_seq_lens = lengths_of(fields, "encoder_seq_lens", reqs)
            self.encoder_query_lens = lengths_of(fields, "encoder_query_lens", reqs)
            self.encoder_seq_start_loc = lengths_of(fields, "encoder_seq_start_loc", reqs + 1)
            self.encoder_query_start_loc = lengths_of(fields, "encoder_query_start_loc", reqs + 1)
        for g in range(<length_t> len(groups)):
            group, out = groups[g], self.groups + g
            out.slot_mapping = slots_of(group, "slot_mapping", tokens if g < cross else encoder_tokens)
            out.paged_kv_indptr = lengths_of(group, "paged_kv_indptr", reqs + 1)
            out.paged_kv_last_page_len = lengths_of(group, "paged_kv_last_page_len", reqs)
            out.shares_pages = False
            for h in range(g):
                other = groups[h]
                out.shares_pages |= other["paged_kv_indptr"] is group["paged_kv_indptr"]
        self.max_reqs, self.max_tokens = <length_t> reqs, <length_t> tokens
        self.max_cross_slots = <length_t> encoder_tokens if has_cross else 0
        self.num_columns, self._columns = 0, []
        self.step = -1
        self.req_ids = self.moves = self.views = ()
        # Nothing is written before the first step: this memory may hold a step of another shape.

    def add_column(self, ColumnState column, out):
        """``out`` uint8[bytes]: where each step has the items of a column."""
        cdef unsigned char[::1] view = out
        cdef ColumnView* items = &column.view
        if self.num_columns == MAX_COLUMNS:
            raise ValueError(f"column: a step of this arena has {MAX_COLUMNS} already")
        check_length("column", view.shape[0], (self.max_tokens if items.per_token else self.max_reqs) * items.itemsize)
        self._columns.append((column, out))
        self.columns[self.num_columns].column = items
        self.columns[self.num_columns].out = <char*> &view[0]
        self.num_columns += 1

    cdef void _forget(self) noexcept:
        """Forgets this arena's last step: a step of another shape may have been written here."""
        cdef length_t g
        self.counting = 0
        self.version = -1
        self.query_start_loc[0] = self.seq_start_loc[0] = 0
        for g in range(MAX_GROUPS + 1):
            if self.groups[g].paged_kv_indptr != NULL:
                self.groups[g].paged_kv_indptr[0] = 0
        if self.encoder_seq_lens != NULL:
            self.encoder_seq_start_loc[0] = self.encoder_query_start_loc[0] = 0


cdef void drop_views(tuple views):
    """Drops the cached arrays of an arena's last step. In C: an exception in the middle would leave some."""
    cdef dict cached
    cdef tuple names
    for cached, names in views:
        for name in names:
            if name in cached:
                del cached[name]
