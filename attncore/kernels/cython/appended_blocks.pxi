# append_blocks, and append_blocks_by_group: blocks for several requests of a batch, in one call.

from cpython.dict cimport PyDict_CheckExact, PyDict_GetItemWithError, PyDict_Next, PyDict_Size
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject


def append_blocks(BatchState batch, TableState table, order, dict given):
    """Appends ``given``'s lists of block ids, by request, to the rows of ``order``: True, or False and nothing done.

    False stands for whatever is not plain: names that are no str or int, in ``given`` or in the batch, whose comparison
    would run code of others; unknown names; ids that are no small ints or cannot stand there; preempted requests; a
    caller inside. The longer way then does all of it, or says what is wrong. No code of others runs in here, nor a
    signal's handler or another thread, which could make the rows of the names wrong.

    A step in which requests cross into new blocks calls this once, and between two runs of a model each Python function
    on its way is cold.
    """
    cdef dict row_of = order.known
    cdef Py_ssize_t count = PyDict_Size(given)
    cdef length_t* rows
    if batch.state != FREE or row_of is None or not order.plain or order.paused or not 0 < count <= batch.capacity:
        return False
    rows = <length_t*> PyMem_Malloc(count * sizeof(length_t))
    if rows == NULL:
        return False
    batch.num_callers += 1
    try:
        return find_rows(batch, row_of, given, rows) and append_rows(table, given, count, rows)
    finally:
        PyMem_Free(rows)


cdef bint find_rows(BatchState batch, dict row_of, dict given, length_t* rows) except -1:
    """Writes the row of each request in turn; False where one is not plain or not known."""
    cdef Py_ssize_t position = 0, k = 0
    cdef PyObject* name
    cdef PyObject* ids
    while PyDict_Next(given, &position, &name, &ids):
        rows[k] = plain_row(batch, row_of, name)
        if rows[k] < 0 or not PyList_CheckExact(<object> ids):
            return False
        k += 1
    return True


cdef length_t plain_row(BatchState batch, dict row_of, PyObject* name) except -2:
    """The row of a request; -1 where it is not known, or where comparing its name may run code of others."""
    cdef PyObject* row
    cdef slot_t value = 0
    if type(<object> name) is not str and type(<object> name) is not int:
        return -1
    row = PyDict_GetItemWithError(row_of, <object> name)
    if row == NULL or read_small_int(row, &value) == 0 or not 0 <= value < batch.capacity:
        return -1
    return <length_t> value


cdef bint append_rows(TableState table, dict given, Py_ssize_t count, length_t* rows) noexcept:
    """Appends to each row in turn; False, and no row has changed, where one cannot take its ids. Runs no Python."""
    cdef Py_ssize_t position = 0, k = 0
    cdef PyObject* name
    cdef PyObject* ids
    while k < count and PyDict_Next(given, &position, &name, &ids):
        if not append_row(table, rows[k], ids):
            take_back_rows(table, given, k, rows)
            return False
        k += 1
    return True


cdef bint append_row(TableState table, length_t row, PyObject* ids) noexcept:
    cdef TableView* view = &table.view
    cdef length_t each = table.kernel_blocks, held = view.num_blocks[row], column = held, e
    cdef Py_ssize_t k, count = PyList_GET_SIZE(<list> ids)
    cdef block_id_t* out = view.table + <slot_t> row * view.width
    cdef slot_t value = 0
    cdef bint right = count <= (table.width - held) // each
    if not right:
        return False
    for k in range(count):
        if not read_small_int(<PyObject*> PyList_GET_ITEM(<list> ids, k), &value) or not 0 < value < table.num_blocks:
            right = False
            break
        for e in range(each):
            out[column + e] = <block_id_t> value * each + e
        column += each
    view.num_blocks[row] = column
    if right and stands(view, row, held, 0, each):
        return True
    shorten_row(view, row, held)
    return False


cdef void take_back_rows(TableState table, dict given, Py_ssize_t count, length_t* rows) noexcept:
    """Takes back what was appended to the first rows."""
    cdef length_t added
    cdef Py_ssize_t position = 0, k = 0
    cdef PyObject* name
    cdef PyObject* ids
    while k < count and PyDict_Next(given, &position, &name, &ids):
        added = <length_t> PyList_GET_SIZE(<list> ids) * table.kernel_blocks
        shorten_row(&table.view, rows[k], table.view.num_blocks[rows[k]] - added)
        k += 1


cdef void shorten_row(TableView* view, length_t row, length_t held) noexcept:
    memset(view.table + <slot_t> row * view.width + held, 0, (view.num_blocks[row] - held) * sizeof(block_id_t))
    view.num_blocks[row] = held


cdef struct Appended:
    TableView* view
    PyObject* table  # a TableState
    PyObject* ids
    length_t row
    length_t held  # columns before


def append_blocks_by_group(BatchState batch, tuple tables, tuple names, order, dict given):
    """``append_blocks`` where a batch has several KV-cache groups: ``given`` has, by request, a dict of lists by group.

    ``tables`` and ``names``, plain texts, are those of its groups of decoders. Whatever names another group is not
    plain.
    """
    cdef dict row_of = order.known
    cdef Py_ssize_t count = PyDict_Size(given), num_appended, k = 0
    cdef Appended* appended
    if batch.state != FREE or row_of is None or not order.plain or order.paused or not 0 < count <= batch.capacity:
        return False
    appended = <Appended*> PyMem_Malloc(count * len(tables) * sizeof(Appended))
    if appended == NULL:
        return False
    batch.num_callers += 1
    try:
        num_appended = find_appended(batch, tables, names, row_of, given, appended)
        if num_appended < 0:
            return False
        while k < num_appended and append_row(<TableState> appended[k].table, appended[k].row, appended[k].ids):
            k += 1
        if k == num_appended:
            return True
        while k > 0:
            k -= 1
            shorten_row(appended[k].view, appended[k].row, appended[k].held)
        return False
    finally:
        PyMem_Free(appended)


cdef Py_ssize_t find_appended(
    BatchState batch, tuple tables, tuple names, dict row_of, dict given, Appended* out
) except -2:
    """Writes what each request appends to which group: how many such, or -1 where one is not plain or not known."""
    cdef Py_ssize_t position = 0, inner = 0, k = 0, g
    cdef PyObject* name
    cdef PyObject* by_group
    cdef PyObject* group
    cdef PyObject* ids
    cdef TableState table
    cdef length_t row
    while PyDict_Next(given, &position, &name, &by_group):
        row = plain_row(batch, row_of, name)
        if row < 0 or not PyDict_CheckExact(<object> by_group) or PyDict_Size(<object> by_group) > len(tables):
            return -1
        inner = 0
        while PyDict_Next(<object> by_group, &inner, &group, &ids):
            if type(<object> group) is not str or not PyList_CheckExact(<object> ids):
                return -1
            g = 0
            while g < len(names) and <str> names[g] != <str> group:
                g += 1
            if g == len(names):
                return -1
            table = <TableState> tables[g]
            out[k] = Appended(&table.view, <PyObject*> table, ids, row, table.view.num_blocks[row])
            k += 1
    return k
