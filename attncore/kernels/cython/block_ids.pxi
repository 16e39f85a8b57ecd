# Reading block ids of Python objects.

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject

cdef extern from "kernels/cython/read_int.h":
    const char* ATTNCORE_READS_INTS
    int read_int "attncore_read_int"(PyObject* item, slot_t* value) except -1


cdef inline int check_row(length_t row, length_t capacity) except -1:
    """IndexError for a row that is none: whoever names it, nothing is written outside of the arrays."""
    if not 0 <= row < capacity:
        raise IndexError(row)
    return 0


cdef object readable(object ids):
    """What read_ids takes of a row: a list, or a one-dimensional int32 or int64 memoryview; None where it is no row."""
    if type(ids) is list:
        return ids
    if type(ids) is tuple:
        return list(ids)
    if not hasattr(ids, "__len__"):  # an iterator can be read only once, and a refusal reads it again
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
    """Block ids 0 <= id < limit of a ``readable`` row into out: the count, or -1 where one is bad."""
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
    # The size is read each time: an item's __index__ may be the caller's own code.
    while k < PyList_GET_SIZE(items) and k < count:
        if read_int(<PyObject*> PyList_GET_ITEM(items, k), &value) == 0 or value < 0 or value >= limit:
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
