/* Reads a small Python int into int64_t: 1 where it was read, 0 for a large one and for any other object.

   Block tables are long lists of small ints, so the interpreter's own layout of an int is used where it is known;
   ATTNCORE_PUBLIC_C_API leaves it out. */
#ifndef ATTNCORE_READ_INT_H
#define ATTNCORE_READ_INT_H

#include <Python.h>
#include <stdint.h>

#if defined(ATTNCORE_PUBLIC_C_API) || defined(PYPY_VERSION)
  #define ATTNCORE_READS_INTS "public C API"
#else
  #define ATTNCORE_READS_INTS "interpreter layout"
#endif
static inline int attncore_read_small_int(PyObject *object, int64_t *value) {
#if defined(ATTNCORE_PUBLIC_C_API) || defined(PYPY_VERSION)
    int overflow = 0;
    if (!PyLong_CheckExact(object)) return 0;
    *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
#else
    if (!Py_IS_TYPE(object, &PyLong_Type)) return 0;
  #if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)object)) {
        *value = (int64_t)PyUnstable_Long_CompactValue((PyLongObject *)object);
        return 1;
    }
  #else
    Py_ssize_t size = Py_SIZE(object);
    if (size == 1) { *value = (int64_t)((PyLongObject *)object)->ob_digit[0]; return 1; }
    if (size == 0) { *value = 0; return 1; }
  #endif
    return 0;
#endif
}

#endif
