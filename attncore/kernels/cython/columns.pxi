# Columns: numbers that an engine keeps for its requests, gathered into each step by row.

cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.string cimport memcpy, memset


# A column as loops see it. A place is a request's for as long as it is in the batch, whatever its row.
cdef struct ColumnView:
    char* values            # by place: ``width`` items
    Py_ssize_t itemsize, width
    bint per_token
    slot_t* given           # by place: the address of the tokens that the request was given
    length_t* num_given     # by place: how many those are


# A column, and its array in one arena.
cdef struct ColumnOut:
    ColumnView* column
    char* out


@cython.final
cdef class ColumnState:
    """``values`` uint8[places, bytes]: items of ``itemsize`` bytes for each place.

    With ``per_token`` a request's token at position p is the p-th that it was given, and behind those the items of its
    place in turn; else a request has one item. ``given`` int64[places] and ``num_given`` int32[places] are kept here.
    ``integers``: items are signed ints.
    """

    cdef ColumnView view
    cdef object _keep
    cdef list tokens        # by place: what was given
    cdef bint integers      # whether items are int32 or int64

    def __init__(self, values, Py_ssize_t itemsize, bint per_token, given, num_given, bint integers):
        cdef unsigned char[:, ::1] items = values
        cdef slot_t[::1] addresses = given
        cdef length_t[::1] counts = num_given
        self._keep = values, given, num_given
        self.integers = integers and itemsize in (sizeof(length_t), sizeof(slot_t))
        self.tokens = [None] * items.shape[0]
        self.view.values, self.view.itemsize = <char*> &items[0, 0], itemsize
        self.view.width, self.view.per_token = items.shape[1] // itemsize, per_token
        self.view.given, self.view.num_given = &addresses[0], &counts[0]

    def give(self, length_t place, tokens):
        """Gives a place the tokens (uint8, or None) of positions 0, 1, 2, ..."""
        cdef const unsigned char[::1] view
        check_row(place, <length_t> len(self.tokens))
        self.view.num_given[place] = 0
        if tokens is not None and len(tokens):
            view = tokens
            self.view.given[place] = <slot_t> <size_t> &view[0]
            self.view.num_given[place] = <length_t> (view.shape[0] // self.view.itemsize)
        self.tokens[place] = tokens

    def tokens_of(self, length_t place):
        """What the place was given, or None."""
        check_row(place, <length_t> len(self.tokens))
        return self.tokens[place]

    def write(self, BatchState batch, list values, length_t count):
        """Writes a list's first ints to the places of the first ``count`` rows.

        False, and nothing written, where one is no plain int that the column holds.
        """
        cdef length_t i
        cdef slot_t value
        cdef slot_t* wide = <slot_t*> self.view.values
        cdef length_t* narrow = <length_t*> self.view.values
        cdef Py_ssize_t width = self.view.width
        cdef bint is_wide = self.view.itemsize == sizeof(slot_t)
        if not self.integers or count > batch.capacity or PyList_GET_SIZE(values) < count:
            return False
        for i in range(count):
            if read_small_int(<PyObject*> PyList_GET_ITEM(values, i), &value) == 0:
                return False
            if not is_wide and not -MAX_INT32 <= value <= MAX_INT32:
                return False
        for i in range(count):
            read_small_int(<PyObject*> PyList_GET_ITEM(values, i), &value)
            if is_wide:
                wide[batch.places[i] * width] = value
            else:
                narrow[batch.places[i] * width] = <length_t> value
        return True


cdef inline void take_items(const ColumnView* column, length_t place, length_t start, length_t count,
                            char* out) noexcept nogil:
    """The tokens of positions start..start + count of a place, to ``out``; 0 where the place has none."""
    cdef Py_ssize_t size = column.itemsize
    cdef slot_t given = min(max(<slot_t> column.num_given[place] - start, 0), count)
    cdef Py_ssize_t own = min(<Py_ssize_t> (count - given), column.width)
    if given:
        memcpy(out, <char*> <size_t> column.given[place] + start * size, given * size)
    memcpy(out + given * size, column.values + place * column.width * size, own * size)
    memset(out + (given + own) * size, 0, (count - given - own) * size)


cdef void fill_columns(const ColumnOut* columns, length_t num_columns, const length_t* places, const length_t* computed,
                       const length_t* query_lens, length_t num_ones, length_t num_rows, length_t num_reqs,
                       length_t num_tokens) noexcept nogil:
    """Fills each column's array for ``num_rows`` rows that have run, the first ``num_ones`` one token each; pads by 0.

    ``computed`` counts the tokens of the step already.
    """
    cdef length_t c, i, query_len
    cdef Py_ssize_t size, done
    cdef const ColumnView* column
    cdef char* out
    for c in range(num_columns):
        column, out = columns[c].column, columns[c].out
        size, done = column.itemsize, 0
        if not column.per_token:
            for i in range(num_rows):
                memcpy(out + i * size, column.values + places[i] * size, size)
            memset(out + num_rows * size, 0, (num_reqs - num_rows) * size)
            continue
        for i in range(num_rows):
            query_len = 1 if i < num_ones else query_lens[i]
            take_items(column, places[i], computed[i] - query_len, query_len, out + done * size)
            done += query_len
        memset(out + done * size, 0, (num_tokens - done) * size)


cdef length_t check_tokens(const ColumnView* column, const length_t* places, const length_t* computed,
                           const length_t* query_lens, length_t num_rows) noexcept nogil:
    """The first row that would run a token which the column has not; -1: none."""
    cdef length_t i, given
    for i in range(num_rows):
        given = max(column.num_given[places[i]], computed[i])
        if column.per_token and query_lens[i] > 1 and <slot_t> computed[i] + query_lens[i] - given > column.width:
            return i
    return -1


cdef length_t check_tokens_ahead(const ColumnView* column, const length_t* places, const length_t* computed,
                                 const length_t* query_lens, length_t num_rows) noexcept nogil:
    """The first row of which a column has tokens behind the first that it runs, which the device has not; -1: none."""
    cdef length_t i
    for i in range(num_rows):
        if column.per_token and query_lens[i] > 1 and <slot_t> column.num_given[places[i]] - computed[i] > 1:
            return i
    return -1
