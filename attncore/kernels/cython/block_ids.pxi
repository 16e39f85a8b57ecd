# Reading block ids of Python objects.

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_ND, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject

from numpy import dtype, ndarray

from attncore.arguments import UNREADABLE, integer_or_none, why_no_list

cdef extern from "kernels/cython/read_int.h":
    const char* ATTNCORE_READS_INTS
    int read_small_int "attncore_read_small_int"(PyObject* item, slot_t* value) noexcept


cdef object INT32 = dtype("int32"), INT64 = dtype("int64")  # each is one object in NumPy

cdef frozenset NUMPY_INTEGERS = frozenset([dtype(code).type for code in "bhilqBHILQ"])


cdef int read_other_int(object item, slot_t* value) except -1:
    """read_int of what is no small int, by the definition of attncore.arguments."""
    cdef int overflow = 0
    cdef object number = PyNumber_Index(item) if type(item) in NUMPY_INTEGERS else integer_or_none(item)
    if number is None:
        return 0
    value[0] = PyLong_AsLongLongAndOverflow(number, &overflow)
    return overflow == 0


cdef inline int read_int(PyObject* item, slot_t* value) except -1:
    """Reads an integer of 64 bits: 1, or 0 for an object that is none. An item's __index__ is called once."""
    return read_small_int(item, value) or read_other_int(<object> item, value)


cdef inline int check_row(length_t row, length_t capacity) except -1:
    """IndexError for a row that is none: whoever names it, nothing is written outside of the arrays."""
    if not 0 <= row < capacity:
        raise IndexError(row)
    return 0


cdef bint is_aligned(object view) except -1:
    """Whether the items of an array lie where this machine reads numbers of their size: those of a cast need not."""
    cdef Py_buffer buffer
    cdef bint aligned
    PyObject_GetBuffer(view, &buffer, PyBUF_C_CONTIGUOUS)
    aligned = <size_t> buffer.buf % <size_t> buffer.itemsize == 0
    PyBuffer_Release(&buffer)
    return aligned


cdef object readable(object ids):
    """What read_ids takes of a row: a list, or a one-dimensional int32 or int64 memoryview; None where it is no row."""
    if type(ids) is list:
        return ids
    if type(ids) is tuple:
        return list(ids)
    if type(ids) is not ndarray and why_no_list(ids) is not None:
        return None
    if not hasattr(ids, "__len__"):  # an iterator can be read only once, and a refusal reads it again
        return None
    # A subclass of an array may say other items than its memory has: a masked one does.
    if PyObject_CheckBuffer(ids) and (type(ids) is ndarray or not isinstance(ids, ndarray)):
        try:
            view = memoryview(ids)
            if view.ndim == 1 and view.format in ("i", "l", "q") and view.c_contiguous and is_aligned(view):
                return view
        except (BufferError, TypeError, ValueError):
            pass
    try:
        return list(ids)
    except UNREADABLE:
        return None


cdef bint exceeds(object ids, slot_t most) except -1:
    """Whether there are more ids than most: what is no list is read as one, which takes time and memory."""
    try:
        return len(ids) > most
    except UNREADABLE:
        return False  # readable says what it is
    except RuntimeError:  # of a nested tensor, say; another one is the caller's own
        if why_no_list(ids) is None:
            raise
        return False


cdef slot_t read_ids(object row, block_id_t* out, slot_t capacity, slot_t limit) except -3:
    """Block ids 0 <= id < limit of a ``readable`` row into out: the count, or -1 where one is bad."""
    cdef slot_t k, value = 0, count
    cdef PyObject* item
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
        item = <PyObject*> PyList_GET_ITEM(items, k)
        if read_small_int(item, &value) == 0 and read_other_int(<object> item, &value) == 0:
            return -1
        if value < 0 or value >= limit:
            return -1
        out[k] = <block_id_t> value
        k += 1
    return k


cdef slot_t read_buffer(object view, block_id_t* out, slot_t count, slot_t limit) except -3:
    cdef Py_buffer buffer
    PyObject_GetBuffer(view, &buffer, PyBUF_C_CONTIGUOUS)
    count = copy_ids(&buffer, out, count, limit)
    PyBuffer_Release(&buffer)
    return count


cdef inline slot_t copy_ids(const Py_buffer* buffer, block_id_t* out, slot_t count, slot_t limit) noexcept nogil:
    """Integers of 4 or 8 bytes, 0 <= id < limit, into out: the count, or -1 where one is bad."""
    cdef slot_t k
    cdef uint32_t bad = 0, least_bad = <uint32_t> limit, value
    cdef const uint32_t* ids = <const uint32_t*> buffer.buf
    cdef const uint64_t* wide = <const uint64_t*> buffer.buf
    # As unsigned numbers negative ones are too large as well. Two loops without a branch: both use vectors.
    if buffer.itemsize == 4:
        for k in range(count):
            value = ids[k]
            bad |= value >= least_bad
            out[k] = <block_id_t> value
    else:
        for k in range(count):
            bad |= wide[k] >= <uint64_t> limit
            out[k] = <block_id_t> wide[k]
    return -1 if bad else count


cdef int open_array(object ids, Py_buffer* buffer) except -1:
    """Opens an int32 or int64 array of one contiguous dimension, in this machine's byte order: 1, or 0 for all else.

    ``readable`` takes such arrays too, at three times the cost. The caller releases the buffer.
    """
    cdef object kind
    if type(ids) is not ndarray:
        return 0
    kind = ids.dtype
    if kind is not INT32 and kind is not INT64:
        return 0
    try:
        PyObject_GetBuffer(ids, buffer, PyBUF_ND)  # without the format, which NumPy would write anew each time
    except (BufferError, ValueError):
        return 0
    if buffer.ndim == 1 and not <size_t> buffer.buf % <size_t> buffer.itemsize:
        return 1
    PyBuffer_Release(buffer)
    return 0
