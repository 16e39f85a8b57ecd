/* Reads one Python int (not a bool) into int64_t. Returns 1 where it was read, 0 for an object that is no int or does
   not fit 64 bits, -1 where reading was interrupted (an exception that is no Exception is set).

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
static int attncore_not_read(void) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}
static int attncore_read_any(PyObject *object, int64_t *value) {
    PyObject *index;
    if (PyBool_Check(object) || !PyIndex_Check(object)) return 0;
    index = PyNumber_Index(object);
    if (index == NULL) return attncore_not_read();
    *value = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (*value == -1 && PyErr_Occurred()) return attncore_not_read();
    return 1;
}
static inline int attncore_read_int(PyObject *object, int64_t *value) {
#if !defined(ATTNCORE_PUBLIC_C_API) && !defined(PYPY_VERSION)
    if (Py_IS_TYPE(object, &PyLong_Type)) {
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
    }
#else
    if (PyLong_CheckExact(object)) {
        *value = PyLong_AsLongLong(object);
        if (*value == -1 && PyErr_Occurred()) return attncore_not_read();
        return 1;
    }
#endif
    return attncore_read_any(object, value);
}

#endif
