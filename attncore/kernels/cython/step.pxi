# StepKernel: checks, arranges and fills a step with the functions of the other topics.

cimport cython
from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject
from libc.string cimport memcpy


@cython.final
cdef class StepKernel:
    """Builds a step into the next arena.

    ``query_lens`` int32[capacity] is where the caller writes who runs how much (0: not in this step) before ``check``;
    ``swaps`` int32[capacity, 2] and ``kinds`` int8[capacity] are scratch. ``ran`` int32[depth, 2, capacity] is what
    ``take_back`` takes back, by arena: the tokens that a row ran, and the encoder tokens; the caller can write to the
    arenas themselves. Of ``world`` ranks, ``rank`` keeps its turns of ``interleave`` tokens. Each method changes all
    that it changes, or nothing: no exception comes in between.
    """

    cdef BatchState batch
    cdef StepShape eager
    cdef object _keep
    cdef length_t* query_lens
    cdef length_t* swaps
    cdef signed char* kinds
    cdef length_t* ran
    cdef Py_ssize_t depth
    cdef length_t max_model_len, max_num_tokens, max_num_encoder_tokens, decode_threshold
    cdef Ranks ranks
    cdef readonly list last     # by arena of the ring: the StepArena whose step it holds
    cdef readonly slot_t next_step
    cdef dict shapes            # by num_reqs, those of add_shape
    cdef list columns           # those whose tokens each step is checked for

    def __init__(self, BatchState batch, StepShape eager, query_lens, swaps, kinds, ran,
                 length_t max_model_len, length_t max_num_tokens, length_t max_num_encoder_tokens,
                 length_t decode_threshold,
                 length_t world, length_t rank, length_t interleave):
        cdef length_t[::1] lens = query_lens
        cdef length_t[:, ::1] pairs = swaps
        cdef signed char[::1] scratch = kinds
        cdef length_t[:, :, ::1] by_arena = ran
        self.batch, self.eager = batch, eager
        self._keep = query_lens, swaps, kinds, ran
        self.query_lens, self.swaps, self.kinds = &lens[0], &pairs[0, 0], &scratch[0]
        self.ran = &by_arena[0, 0, 0]
        self.depth = len(eager.arenas)
        self.max_model_len, self.max_num_tokens = max_model_len, max_num_tokens
        self.max_num_encoder_tokens, self.decode_threshold = max_num_encoder_tokens, decode_threshold
        self.ranks = Ranks(world, rank, interleave)
        self.shapes, self.columns = {}, []
        self.next_step = 0
        self.last = [None] * self.depth

    def decode_step(self):
        """Runs one token of every row: the metadata, or None where rows must be arranged or a check fails."""
        if self.batch.state != FREE:
            return None
        begin(self.batch)  # the last reference to a removed request's name may be let go, and its __del__ build
        try:
            return self.decode_step_inside(self.eager)
        finally:
            self.batch.state = FREE

    def add_shape(self, bucket, StepShape shape):
        """Adds a shape that ``padded_step`` finds by what its captured size is known by."""
        self.shapes[bucket] = shape

    def add_column(self, ColumnState column):
        """Checks from now on that a column has the tokens that rows run."""
        self.columns.append(column)

    def drop_shape(self, bucket):
        self.shapes.pop(bucket, None)

    def padded_step(self, num_reqs):
        """decode_step in the shape of ``num_reqs`` rows, committed to where graphs read; None also without one."""
        cdef object shape = self.shapes.get(num_reqs) if type(num_reqs) is int else None, metadata
        if shape is None or self.batch.state != FREE:
            return None
        begin(self.batch)
        try:
            metadata = self.decode_step_inside(<StepShape> shape)
            if metadata is not None:
                (<StepShape> shape).commit(self.next_step - 1)
            return metadata
        finally:
            self.batch.state = FREE

    cpdef object decode_step_inside(self, StepShape shape):
        """decode_step in a shape, for the caller that has entered the batch."""
        cdef BatchState batch = self.batch
        cdef length_t longest
        if batch.dirty or batch.num_rows > shape.max_rows:
            return None
        if shape.pads and (batch.num_rows > shape.num_reqs or shape.query_len != 1):
            return None
        longest = decodes_fit(batch, shape, self.max_model_len)
        if longest < 0:
            return None
        return self._run(shape, batch.num_rows, batch.num_rows, batch.num_rows, longest)

    def forget_arena(self, Py_ssize_t arena):
        """Forgets the last step of an arena that somebody has written to."""
        self.last[arena] = None

    def schedule_all(self, length_t query_len):
        """Writes query_len tokens for every row into query_lens."""
        repeat(self.query_lens, query_len, self.batch.num_rows)

    def check(self, bint ahead=False):
        """Checks query_lens, changing nothing: (code, row, token, group). ``ahead``: as tokens of that many steps."""
        cdef Failure failure = Failure(0, 0, 0)
        cdef length_t code = self.check_step(&failure, ahead)
        return code, failure.row, failure.token, failure.group

    cdef length_t check_step(self, Failure* failure, bint ahead) noexcept:
        cdef length_t row, code = check_rows(self.batch, self.query_lens, self.max_model_len,
                                             MAX_INT32 if ahead else self.max_num_tokens,
                                             self.max_num_encoder_tokens, failure)
        cdef ColumnState column
        cdef BatchState batch = self.batch
        if code == OK and self.columns:
            failure.group = 0
            for column in self.columns:
                row = (check_tokens_ahead if ahead else check_tokens)(&column.view, batch.places, batch.num_computed,
                                                                      self.query_lens, batch.num_rows)
                if row >= 0:
                    failure.row = row
                    return GIVEN_TOKENS if ahead else NO_TOKENS
                failure.group += 1
        return code

    def check_shape(self, StepShape shape):
        """Whether the checked step fits a shape that pads: (code, row, number of rows that run)."""
        cdef Failure failure = Failure(0, 0, 0)
        cdef length_t code = check_shape(self.batch, self.query_lens, shape, &failure)
        return code, failure.row, failure.token

    def arrange(self, start_moving):
        """Orders rows and query_lens by the fewest swaps: decodes (up to the threshold), prefills (more), rest (0).

        Returns (the swaps in turn, decodes, decodes and prefills). A roll-back takes the swaps of rows back.
        ``start_moving`` is called before the first swap, where there is one.
        """
        cdef length_t i, count, num_decodes, num_prefills, n = self.batch.num_rows
        mark_kinds(self.query_lens, n, self.decode_threshold, self.kinds, &num_decodes, &num_prefills)
        count = plan_swaps(self.kinds, n, num_decodes, num_prefills, self.swaps)
        cdef tuple moves = tuple([(self.swaps[2 * i], self.swaps[2 * i + 1]) for i in range(count)]) if count else ()
        if count:
            start_moving()
            self.batch.undo.append((self.batch.unswap, moves))
        for i in range(count):
            swap_rows(self.batch, self.swaps[2 * i], self.swaps[2 * i + 1])
            exchange_lengths(self.query_lens, self.swaps[2 * i], self.swaps[2 * i + 1])
        return moves, num_decodes, num_decodes + num_prefills

    def step(self, StepShape shape, length_t num_decodes, length_t num_reqs):
        """Runs arranged and checked rows: the metadata. The caller sets the arena's moves."""
        cdef BatchState batch = self.batch
        cdef length_t g, num_ones = count_ones(self.query_lens, num_decodes)
        for g in range(batch.num_decoders):
            if not batch.decoders[g].follows:
                cache_decode_blocks(batch.decoders[g], num_ones)
        batch.version += 1
        return self._run(shape, num_ones, num_decodes, num_reqs, longest_of(batch.num_computed, num_ones))

    def empty_step(self, StepShape shape, length_t max_seq_len):
        """Runs a step of no rows, all padding; ``max_seq_len``, where not 0, is the largest that a graph may meet."""
        cdef StepArena out
        cdef object metadata = self._run(shape, 0, 0, 0, 0)
        out = <StepArena> PyList_GET_ITEM(shape.arenas, <Py_ssize_t> ((self.next_step - 1) % self.depth))
        out.req_ids = ()
        if max_seq_len:
            out.max_seq_len = out.max_decode_seq_len = max_seq_len
            out.max_encoder_seq_len = self.batch.max_encoder_len
            out.version = -1  # the next step's longest encoder is another
        return metadata

    def take_back(self, StepShape shape, slot_t step):
        """Takes the last step back, its tokens, encoders and number, where it is ``step``; its rows stay in order."""
        cdef BatchState batch = self.batch
        cdef StepArena out
        cdef length_t i
        cdef length_t* ran = self.ran + 2 * <Py_ssize_t> (step % self.depth) * batch.capacity
        batch.dirty = True
        if self.next_step - 1 != step:
            return
        (<object> PyList_GET_ITEM(shape.metadata, <Py_ssize_t> (step % self.depth))).forget_step()
        self.next_step = step
        out = <StepArena> PyList_GET_ITEM(shape.arenas, <Py_ssize_t> (self.next_step % self.depth))
        for i in range(out.num_actual_reqs):
            batch.num_computed[i] = max(batch.num_computed[i] - (1 if i < out.num_ones else ran[i]), 0)
            if batch.cross != NULL and out.num_cross_slots and ran[batch.capacity + i]:
                batch.encoder_done[i] = 0
        batch.version += 1

    cdef object _run(self, StepShape shape, length_t num_ones, length_t num_decodes, length_t num_reqs,
                     length_t longest_one):
        cdef Py_ssize_t k = <Py_ssize_t> (self.next_step % self.depth)
        cdef StepArena out = <StepArena> PyList_GET_ITEM(shape.arenas, k)
        cdef BatchState batch = self.batch
        cdef length_t* ran = self.ran + 2 * k * batch.capacity
        cdef object metadata = <object> PyList_GET_ITEM(shape.metadata, k)
        cdef object old_req_ids = out.req_ids  # let go when all is done: the last reference may be here
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
            memcpy(ran, self.query_lens, num_reqs * sizeof(length_t))
        out.num_ones = num_ones
        out.num_decodes = num_decodes
        out.num_reqs = out.num_actual_reqs = num_reqs
        out.num_actual_tokens = out.num_tokens
        out.num_prefills = num_reqs - num_decodes
        out.num_prefill_tokens = out.num_tokens - out.num_decode_tokens
        if self.ranks.world > 1:
            keep_local(out, batch, self.ranks)
        if batch.cross != NULL:
            fill_encoder(out, batch, num_reqs)
            if out.num_cross_slots:
                memcpy(ran + batch.capacity, out.encoder_query_lens, num_reqs * sizeof(length_t))
        if shape.pads:
            pad_step(out, batch, shape)
        out.max_query_len = out.max_prefill_query_len
        if num_decodes or shape.pads:
            out.max_query_len = max(out.max_query_len, out.max_decode_query_len)
        out.max_seq_len = max(out.max_decode_seq_len, out.max_prefill_seq_len)
        if out.num_columns:
            fill_columns(out.columns, out.num_columns, batch.places, batch.num_computed, self.query_lens, num_ones,
                         num_reqs, out.num_reqs, out.num_tokens)
        out.step = self.next_step
        out.req_ids = batch.req_ids
        out.changes = batch.changes
        out.moves = ()
        self.next_step += 1
        if out.num_tokens != num_tokens or out.num_reqs != old_num_reqs or out.num_cross_slots != num_cross_slots:
            drop_views(out.views)
        return metadata
