# append_slots: the slots of one sequence, for engines that compute them sequence by sequence.

from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_Append, PyList_GET_ITEM, PyList_GET_SIZE, PyList_SetSlice
from cpython.long cimport PyLong_FromLongLong
from cpython.object cimport PyObject


cdef object PAD_SLOT = PAD_SLOT_ID

cdef enum:
    MOST_AT_ONCE = 1 << 24  # tokens for which no signal is looked at


def append_slots(
    is_profile_run, slot_mapping, seq_id, seq_len, context_len, start_idx, block_size, block_tables
) -> bool:
    """Does ``compute_slot_mapping`` where all is plain: True, or False and nothing appended.

    Plain are lists, a dict of them, a sequence named by an int, and small ints. Anything else takes the longer way,
    which says what is wrong.
    """
    cdef slot_t stop = 0, context = 0, first = 0, size = 0, name = 0
    cdef PyObject* found = NULL
    if is_profile_run is not False or type(slot_mapping) is not list or type(block_tables) is not dict:
        return False
    if not (
        read_small_int(<PyObject*> seq_id, &name) and read_small_int(<PyObject*> seq_len, &stop)
        and read_small_int(<PyObject*> context_len, &context) and read_small_int(<PyObject*> start_idx, &first)
        and read_small_int(<PyObject*> block_size, &size)
    ):
        return False
    if not 0 <= context < stop <= MAX_INT32 or first < 0 or not 1 <= size <= MAX_INT32 or stop - context > MOST_AT_ONCE:
        return False
    found = PyDict_GetItemWithError(<dict> block_tables, seq_id)
    if found == NULL or type(<object> found) is not list:
        return False
    return append_slots_of_list(<list> slot_mapping, <list> <object> found, context, max(context, first), stop, size)


cdef bint append_slots_of_list(
    list out, list table, slot_t context, slot_t first, slot_t stop, slot_t size
) except -1:
    """Appends -1 for tokens context..first and slots for first..stop; False, and nothing, where the table is wrong.

    Neither lists of ints nor ints are known to the garbage collector: no code of others runs between the two passes.
    """
    cdef Py_ssize_t before = PyList_GET_SIZE(out), column
    cdef slot_t token = context, block_id = 0, run
    if first >= stop or (stop - 1) // size >= PyList_GET_SIZE(table):
        return False
    for column in range(first // size, (stop - 1) // size + 1):
        if not read_small_int(<PyObject*> PyList_GET_ITEM(table, column), &block_id) or not 0 <= block_id <= MAX_INT32:
            return False
    try:
        while token < first:
            PyList_Append(out, PAD_SLOT)
            token += 1
        while token < stop:
            read_small_int(<PyObject*> PyList_GET_ITEM(table, token // size), &block_id)
            run = min(size - token % size, stop - token)
            append_run(out, block_id * size + token % size, run)
            token += run
    except BaseException:  # no memory is left
        PyList_SetSlice(out, before, PyList_GET_SIZE(out), [])
        raise
    return True


cdef int append_run(list out, slot_t first, slot_t count) except -1:
    """Appends first, first + 1 and so on."""
    cdef slot_t slot
    for slot in range(first, first + count):
        PyList_Append(out, PyLong_FromLongLong(slot))
    return 0
