# SentSteps: a step for a device in one call, from the requests' names to the header and the journal that it reads.

cimport cython
from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next, PyDict_Size
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE


@cython.final
cdef class SentSteps:
    """Builds steps that nodes of graphs fetch, without the Python between the kernel and the sender.

    Whatever is not plain (a refusal, a wait, a name of an engine's own class) is answered with None and changes
    nothing: the caller's longer way then does all of it. Of a request the name is touched, and that only where it is
    not the object that the row has. ``core`` is the BatchCore, ``eager`` the eager shapes by the bits of their tokens,
    ``fill`` what fills the engine's own fields, or None; ``current``, where given, says which device is the current
    one, ``index`` that of these steps.
    """

    cdef StepKernel kernel
    cdef StepSender sender
    cdef object core, order, backends, side, is_capturing, current, spans
    cdef object take_back, unsend
    cdef list eager
    cdef int index, forks
    cdef bint waits_for_last
    cdef public object fill

    def __init__(self, StepKernel kernel, StepSender sender, core, backends, side, list eager, fill,
                 is_capturing, current, int index):
        self.kernel, self.sender, self.core, self.order, self.backends = kernel, sender, core, core.order, backends
        self.side, self.eager, self.fill, self.is_capturing = side, eager, fill, is_capturing
        self.current, self.index, self.forks, self.spans = current, index, num_forks, core.spans
        self.waits_for_last = backends.waits_for_last_plan
        self.take_back, self.unsend = kernel.take_back, side.take_back

    def build(self, scheduled, query_len, bucket):
        """The metadata of the next step; ``scheduled`` None: every request runs ``query_len`` tokens."""
        cdef BatchState batch = self.kernel.batch
        cdef object shape = None, metadata
        cdef slot_t each
        if read_small_int(<PyObject*> query_len, &each) == 0 or each < 1 or each > MAX_INT32:
            return None
        if scheduled is not None and type(scheduled) is not dict:
            return None
        if bucket is not None:
            shape = self.kernel.shapes.get(bucket) if type(bucket) is int else None
            if shape is None:
                return None
        if not self._can_begin(shape):
            return None
        begin(batch)
        try:
            metadata = None if self._runs_spans(bucket) else self._build(shape, scheduled, <length_t> each)
            batch.undo.clear()
            return metadata
        except BaseException:
            batch.roll_back()
            raise
        finally:
            batch.state = UNFINISHED if PyList_GET_SIZE(batch.undo) else FREE

    cdef bint _can_begin(self, shape) except -1:
        """Whether a step of ``shape`` can be built now. No code runs behind it that is not this call's."""
        if self.is_capturing() or (self.current is not None and self.current() != self.index):
            return False
        return self.kernel.batch.state == FREE and self.forks == num_forks and self._is_free(shape)

    cdef bint _runs_spans(self, bucket) except -1:
        """Whether the next step may have spans, which the longer way looks at. For a caller inside."""
        return self.spans is not None and bool(self.spans.run(bucket))

    cdef bint _is_planned(self, shape) except -1:
        """Whether the host plans steps of this shape, some group's at least; ``shape`` None: an eager one."""
        if not self.backends.plans:
            return False
        return shape is None or (<StepShape> shape).plans is None or bool((<StepShape> shape).plans)

    cdef bint _is_free(self, shape) except -1:
        """Whether the arena of the next step was read, no step waits for its replay, and nothing is sent beside it."""
        cdef slot_t step = self.kernel.next_step
        cdef slot_t last = step - 1 if self.waits_for_last and self._is_planned(shape) else step - self.kernel.depth
        if not self.sender.alone or self.sender.ahead or self.sender.pending >= 0:
            return False
        return last < 0 or load_word(self.sender.receipt + RECEIPT_STEP) >= last

    cdef object _build(self, shape, dict scheduled, length_t each):
        cdef StepKernel kernel = self.kernel
        cdef BatchState batch = kernel.batch
        cdef object metadata = None, eager = shape
        if each == 1 and not batch.dirty and (scheduled is None or self._names_all(scheduled)):
            if eager is None:
                eager = self._eager(batch.num_rows)
                if eager is None:
                    return None
            self._begin(eager)
            metadata = kernel.decode_step_inside(<StepShape> eager)
            if metadata is not None:
                self._send(<StepShape> eager, metadata)
                return metadata
            batch.undo.clear()
        return self._arranged(shape, scheduled, each)

    cdef bint _names_all(self, dict scheduled) except -1:
        """Whether every row is named, in order and by the very object that it has, and runs one token."""
        cdef PyObject* name
        cdef PyObject* count
        cdef slot_t tokens
        cdef Py_ssize_t at = 0, row = 0
        cdef tuple names = self.kernel.batch.req_ids
        cdef Py_ssize_t n = PyTuple_GET_SIZE(names)
        if PyDict_Size(scheduled) == 0:
            return True
        if PyDict_Size(scheduled) != n:
            return False
        while PyDict_Next(scheduled, &at, &name, &count):
            if PyTuple_GET_ITEM(names, row) != name or read_small_int(count, &tokens) == 0 or tokens != 1:
                return False
            row += 1
        return True

    cdef object _eager(self, slot_t num_tokens):
        """The shape of an eager step of so many tokens; None: none was made in advance."""
        cdef Py_ssize_t bits = 0
        while <slot_t> 1 << bits < num_tokens:
            bits += 1
        return self.eager[bits] if bits < PyList_GET_SIZE(self.eager) else None

    cdef object _begin(self, shape):
        """A roll-back from now on takes back the next step."""
        self.kernel.batch.undo.append((self.take_back, shape, self.kernel.next_step))

    cdef bint _schedule(self, dict scheduled, length_t each) except -1:
        """Writes who runs how many tokens; False where a name or a number is not plain."""
        cdef length_t* query_lens = self.kernel.query_lens
        cdef length_t n = self.kernel.batch.num_rows
        cdef list names = self.order.req_ids
        cdef object row_of = None, key
        cdef PyObject* name
        cdef PyObject* count
        cdef PyObject* found
        cdef slot_t tokens, row, guess = 0
        cdef Py_ssize_t at = 0
        if PyList_GET_SIZE(names) != n:
            return False
        repeat(query_lens, each, n)
        if self.kernel.batch.dirty:
            for rows in (self.order.holes, self.order.paused):
                for row in rows:
                    if row < n:
                        query_lens[row] = 0
        if scheduled is None:
            return True
        while PyDict_Next(scheduled, &at, &name, &count):
            # First the number: the look-up of a name may run code, which may let it go.
            if read_small_int(count, &tokens) == 0 or tokens < 0 or tokens > MAX_INT32:
                return False
            row = guess
            if row >= n or PyList_GET_ITEM(names, row) != name or name == <PyObject*> None:
                key = <object> name
                if type(key) is not int and type(key) is not str:
                    return False
                if row_of is None:
                    row_of = self.order.row_of
                found = PyDict_GetItemWithError(<dict> row_of, key)
                if found == NULL or read_small_int(found, &row) == 0 or row >= n:
                    return False
            query_lens[row] = <length_t> tokens
            guess = row + 1
        for row in self.order.paused:  # one that holds no slot of states yet, perhaps
            if row < n and query_lens[row]:
                return False
        return True

    cdef object _arranged(self, shape, dict scheduled, length_t each):
        """A step whose rows are checked, and moved where they must."""
        cdef StepKernel kernel = self.kernel
        cdef BatchState batch = kernel.batch
        cdef Failure failure = Failure(0, 0, 0)
        cdef slot_t num_tokens = 0
        cdef Py_ssize_t n
        cdef length_t i, num_decodes, num_reqs
        cdef list names
        cdef tuple moves
        if not self._schedule(scheduled, each):
            return None
        if kernel.check_step(&failure, False) != OK:
            return None
        if shape is not None:
            if check_shape(batch, kernel.query_lens, <StepShape> shape, &failure) != OK:
                return None
        else:
            if batch.cross != NULL:  # whether encoders run says which shape it is
                return None
            for i in range(batch.num_rows):
                num_tokens += kernel.query_lens[i]
            shape = self._eager(num_tokens)
            if shape is None:
                return None
        moves, num_decodes, num_reqs = kernel.arrange(self.core.start_moving)
        names = self.order.req_ids
        n = PyList_GET_SIZE(names)
        if moves or (n and PyList_GET_ITEM(names, n - 1) == <PyObject*> None):
            self.core.take_moves(moves)
            names = self.order.req_ids
        self._begin(shape)
        if moves or batch.dirty or num_reqs != PyTuple_GET_SIZE(batch.req_ids):
            batch.req_ids = tuple(names[:num_reqs])
        batch.dirty = num_reqs != PyList_GET_SIZE(names)
        if moves:
            self.core.count_moves()
        metadata = kernel.step(<StepShape> shape, num_decodes, num_reqs)
        (<StepArena> PyList_GET_ITEM((<StepShape> shape).arenas, self._arena())).moves = moves
        self._send(<StepShape> shape, metadata)
        return metadata

    cdef Py_ssize_t _arena(self) noexcept:
        """The arena of the step that was built last."""
        return <Py_ssize_t> ((self.kernel.next_step - 1) % self.kernel.depth)

    cdef object _send(self, StepShape shape, metadata):
        """Fills and plans the step; then its header and journal, which the replay of its graph publishes."""
        cdef StepSender sender = self.sender
        cdef BatchState batch = self.kernel.batch
        cdef slot_t step = self.kernel.next_step - 1
        cdef StepArena out = <StepArena> PyList_GET_ITEM(shape.arenas, self._arena())
        if self.fill is not None:
            self.fill(metadata)
        if self._is_planned(shape):
            self.backends.plan(metadata, shape.plans)
        batch.undo.append((self.unsend, step))
        if sender.write_journals(shape, out, step, batch.num_rows) == sender.entries:
            self.side.send_surplus(batch.num_rows)
        if shape.pads:
            sender.pending_shape, sender.pending = shape, step
        else:
            if not sender.alone:  # a fill or a plan was the first to ask for a field
                self.side._send_asked(step, shape.capacity)
            sender.publish(step)
            shape.replay()
            sender.note_sent(step, shape)
