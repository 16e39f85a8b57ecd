# ReadOnly: the memory of an array for readers alone.

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_FORMAT, PyBUF_FULL_RO, PyBUF_ND, PyBUF_STRIDES,
    PyBUF_WRITABLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer,
)


@cython.final
cdef class ReadOnly:
    """Exports an array's memory, which cannot be written to through it; nothing leads back to the array."""

    cdef Py_buffer memory
    cdef bint held

    def __cinit__(self, array):
        PyObject_GetBuffer(array, &self.memory, PyBUF_FULL_RO)
        self.held = True

    def __getbuffer__(self, Py_buffer* out, int flags):
        cdef bint strided = flags & PyBUF_STRIDES == PyBUF_STRIDES
        cdef char order = c"A" if flags & ~PyBUF_STRIDES & PyBUF_ANY_CONTIGUOUS else 0
        order = c"F" if flags & ~PyBUF_STRIDES & PyBUF_F_CONTIGUOUS else order
        order = c"C" if flags & ~PyBUF_STRIDES & PyBUF_C_CONTIGUOUS or not strided else order
        if flags & PyBUF_WRITABLE:
            raise BufferError("read-only")
        if order and not PyBuffer_IsContiguous(&self.memory, order):
            raise BufferError("not contiguous")
        out.buf, out.len, out.ndim = self.memory.buf, self.memory.len, self.memory.ndim
        out.itemsize = self.memory.itemsize
        out.format = self.memory.format if flags & PyBUF_FORMAT else NULL
        out.shape = self.memory.shape if flags & PyBUF_ND else NULL
        out.strides = self.memory.strides if strided else NULL
        out.suboffsets = NULL
        out.internal = NULL
        out.readonly = True
        out.obj = self

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.memory)
