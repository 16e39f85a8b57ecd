# BatchState: the requests in flight.

cimport cython


@cython.final
cdef class BatchState(Entrance):
    """The requests in flight: state int32[4, n], whose rows are COMPUTED, ENCODER_LENS, ENCODER_DONE and PLACE (codes).

    ``decoders`` and ``cross`` (or None) are their blocks, a TableState a KV-cache group. ``num_rows`` is the high-water
    mark (rows below it may be empty). ``dirty`` says that rows came, went or sat out since the last build, so that the
    next one must arrange them. ``max_encoder_len`` is what a graph is captured for. A call enters before it changes
    anything (see Entrance).
    """

    cdef object _keep
    cdef length_t* num_computed
    cdef length_t* encoder_lens
    cdef length_t* encoder_done
    cdef length_t* places
    cdef TableView* decoders[MAX_GROUPS]
    cdef length_t num_decoders
    cdef TableView* cross
    cdef slot_t version         # how often the rows of a step were arranged
    cdef readonly length_t capacity
    cdef readonly length_t num_rows
    cdef public bint dirty
    cdef public slot_t changes  # how often blocks of rows changed place or went away
    cdef public length_t max_encoder_len
    cdef public object req_ids

    def __init__(self, state, list decoders, TableState cross):
        cdef length_t[:, ::1] values = state
        cdef TableState group
        cdef TableView* earlier
        cdef length_t g
        self._keep = state, decoders, cross
        self.num_computed = &values[COMPUTED, 0]
        self.encoder_lens, self.encoder_done = &values[ENCODER_LENS, 0], &values[ENCODER_DONE, 0]
        self.places = &values[PLACE, 0]
        self.num_decoders = 0
        for group in decoders:
            group.view.num_computed = self.num_computed
            for g in range(self.num_decoders):
                earlier = self.decoders[g]
                if earlier.size.tokens == group.view.size.tokens and not earlier.follows:
                    group.view.follows, group.view.column = True, earlier.column
                    group.view.next, earlier.next = earlier.next, &group.view
            self.decoders[self.num_decoders] = &group.view
            self.num_decoders += 1
        self.cross = NULL if cross is None else &cross.view
        if self.cross != NULL:
            self.cross.num_computed = self.encoder_lens
        self.capacity = <length_t> values.shape[1]
        self.num_rows = 0
        self.dirty = True
        self.req_ids = ()

    def set_num_rows(self, length_t count):
        check_row(count, self.capacity + 1)
        self.num_rows = count

    def progress(self, length_t row):
        """A row's arguments of ``start``."""
        check_row(row, self.capacity)
        return self.num_computed[row], self.encoder_lens[row], bool(self.encoder_done[row])

    def start(self, length_t row, length_t num_computed, length_t encoder_len, bint encoder_done):
        check_row(row, self.capacity)
        self.num_computed[row] = num_computed
        self.encoder_lens[row] = encoder_len
        self.encoder_done[row] = encoder_done

    def set_computed(self, length_t row, length_t num_computed):
        check_row(row, self.capacity)
        self.num_computed[row] = num_computed

    def swap(self, tuple moves):
        """Exchanges pairs of rows, in turn; a roll-back exchanges them back, the last first."""
        cdef length_t i, j
        self.undo.append(self.swap_back(moves))
        for i, j in moves:
            swap_rows(self, i, j)

    def swap_back(self, tuple moves):
        """What exchanges back pairs that ``swap`` exchanged, for ``undo``."""
        cdef length_t i, j
        for i, j in moves:
            check_row(i, self.capacity)
            check_row(j, self.capacity)
        return self.unswap, moves

    def unswap(self, tuple moves):
        cdef length_t i, j
        for i, j in reversed(moves):
            swap_rows(self, i, j)


cdef void swap_rows(BatchState batch, length_t i, length_t j) noexcept nogil:
    """Exchanges two rows of the batch, in every group."""
    cdef length_t g
    for g in range(batch.num_decoders):
        swap_blocks(batch.decoders[g], i, j)
    if batch.cross != NULL:
        swap_blocks(batch.cross, i, j)
    exchange_lengths(batch.num_computed, i, j)
    exchange_lengths(batch.encoder_lens, i, j)
    exchange_lengths(batch.encoder_done, i, j)
    exchange_lengths(batch.places, i, j)
