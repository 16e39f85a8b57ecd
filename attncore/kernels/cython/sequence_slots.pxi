# append_slots: the slots of one sequence, for engines that compute them sequence by sequence.

from cpython.buffer cimport PyBuffer_Release
from cpython.dict cimport PyDict_GetItemWithError
from cpython.list cimport PyList_Append, PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE, PyList_SetSlice
from cpython.long cimport PyLong_FromLongLong
from cpython.object cimport PyObject
from cpython.sequence cimport PySequence_Repeat


cdef list ONE_PAD = [PAD_SLOT_ID]

cdef enum:
    MOST_AT_ONCE = 1 << 24  # tokens for which no signal is looked at

cdef struct Tokens:
    slot_t context, first, stop  # of a sequence: those before ``first`` have no slot
    slot_t size                  # tokens of a block


def append_slots(
    is_profile_run, slot_mapping, seq_id, seq_len, context_len, start_idx, block_size, block_tables
) -> bool:
    """Does ``compute_slot_mapping`` where all is plain: True, or False and nothing appended.

    Plain are a list to append to, small ints, and a dict with a list, or an array that lies side by side, for a
    sequence that an int names. Anything else takes the longer way, which says what is wrong.
    """
    cdef Tokens tokens
    cdef slot_t start = 0, name = 0
    cdef PyObject* table
    if type(slot_mapping) is not list or (is_profile_run is not False and is_profile_run is not True):
        return False
    if not (
        read_small_int(<PyObject*> seq_len, &tokens.stop) and read_small_int(<PyObject*> context_len, &tokens.context)
        and read_small_int(<PyObject*> start_idx, &start) and read_small_int(<PyObject*> block_size, &tokens.size)
    ):
        return False
    if not 0 <= tokens.context < tokens.stop <= MAX_INT32 or start < 0 or not 1 <= tokens.size <= MAX_INT32:
        return False
    if tokens.stop - tokens.context > MOST_AT_ONCE:
        return False
    tokens.first = max(tokens.context, start)
    if is_profile_run is True:
        tokens.first = tokens.stop
        return append_run(<list> slot_mapping, NULL, NULL, tokens)
    if type(block_tables) is not dict or not read_small_int(<PyObject*> seq_id, &name) or tokens.first >= tokens.stop:
        return False
    table = PyDict_GetItemWithError(<dict> block_tables, seq_id)  # a name's own code may run: nothing is kept before
    return table != NULL and append_slots_of(<list> slot_mapping, <object> table, tokens)


cdef bint append_slots_of(list out, object table, Tokens tokens) except -1:
    """The same for one table, which is held meanwhile."""
    cdef Py_buffer buffer
    if PyList_CheckExact(table):
        return append_run(out, <PyObject*> table, NULL, tokens)
    if not open_array(table, &buffer):
        return False
    try:
        return append_run(out, NULL, &buffer, tokens)
    finally:
        PyBuffer_Release(&buffer)


cdef bint append_run(list out, PyObject* ids, const Py_buffer* buffer, Tokens tokens) except -1:
    """Appends -1 or the slot of each token; False, and nothing, where an id is missing or none. Each is read once.

    Neither lists of ints nor ints are known to the garbage collector: behind the first line no code of others runs.
    """
    cdef slot_t padded = tokens.first - tokens.context
    cdef list pads = PySequence_Repeat(ONE_PAD, padded) if padded > 0 else None
    cdef Py_ssize_t before = PyList_GET_SIZE(out)
    cdef slot_t token = tokens.first, end, slot, block_id = 0
    cdef bint right = token == tokens.stop or (tokens.stop - 1) // tokens.size < num_ids(ids, buffer)
    try:
        if right and pads is not None:
            out.extend(pads)
        while right and token < tokens.stop:
            right = read_block_id(ids, buffer, token // tokens.size, &block_id)
            slot = block_id * tokens.size + token % tokens.size
            end = min(tokens.stop, token + tokens.size - token % tokens.size)
            while right and token < end:
                PyList_Append(out, PyLong_FromLongLong(slot))
                slot += 1
                token += 1
    except BaseException:  # no memory is left
        PyList_SetSlice(out, before, PyList_GET_SIZE(out), [])
        raise
    if not right:
        PyList_SetSlice(out, before, PyList_GET_SIZE(out), [])
    return right


cdef inline slot_t num_ids(PyObject* ids, const Py_buffer* buffer) noexcept:
    return PyList_GET_SIZE(<list> ids) if buffer == NULL else buffer.shape[0]


cdef inline bint read_block_id(PyObject* ids, const Py_buffer* buffer, slot_t column, slot_t* block_id) noexcept:
    """The id in a column of a list or, where there is one, of an array; False where it is none."""
    if buffer == NULL:
        if not read_small_int(<PyObject*> PyList_GET_ITEM(<list> ids, column), block_id):
            return False
    elif buffer.itemsize == 4:
        block_id[0] = (<const int32_t*> buffer.buf)[column]
    else:
        block_id[0] = (<const int64_t*> buffer.buf)[column]
    return 0 <= block_id[0] <= MAX_INT32
