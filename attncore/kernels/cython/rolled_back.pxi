# roll_back: computed tokens of several requests of a batch taken back, in one call.


def roll_back(BatchState batch, order, dict given):
    """Takes back ``given``'s numbers of tokens, by request: True, or False and nothing done.

    False stands for whatever is not plain, as in ``append_blocks``: the longer way then does all of it, or says what is
    wrong. For batches without windows and states, whose blocks and states a request may have lost.
    """
    cdef dict row_of = order.known
    cdef Py_ssize_t position = 0, k = 0, count = PyDict_Size(given)
    cdef PyObject* name
    cdef PyObject* number
    cdef length_t* rows
    cdef length_t* computed
    cdef slot_t value = 0
    if batch.state != FREE or row_of is None or not order.plain or not 0 < count <= batch.capacity:
        return False
    rows = <length_t*> PyMem_Malloc(2 * count * sizeof(length_t))
    if rows == NULL:
        return False
    computed = rows + count
    batch.num_callers += 1
    try:
        while PyDict_Next(given, &position, &name, &number):
            rows[k] = plain_row(batch, row_of, name)
            if rows[k] < 0 or not read_small_int(number, &value) or not 0 <= value <= batch.num_computed[rows[k]]:
                return False
            computed[k] = batch.num_computed[rows[k]] - <length_t> value
            k += 1
        for k in range(count):
            batch.num_computed[rows[k]] = computed[k]
        return True
    finally:
        PyMem_Free(rows)
