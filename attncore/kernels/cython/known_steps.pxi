# KnownSteps: a step of an engine's tensors in one call, where they lie as those of a step before did.

cimport cython
from cpython.dict cimport PyDict_Copy, PyDict_SetItem

cdef extern from "Python.h":
    ctypedef struct PyTypeObject
    object PyType_GenericAlloc(PyTypeObject*, Py_ssize_t)
    int PyObject_GenericSetAttr(object, object, object) except -1

cdef enum:
    NUM_TENSORS = 4
    QUERY_START_LOC = 0
    SEQ_LENS = 1
    BLOCK_TABLE = 2
    SLOT_MAPPING = 3


HOST_INT32 = dtype("int32")


@cython.final
cdef class KnownStep:
    """What steps of one number of rows have in common, while the engine's tensors lie in one place."""

    cdef TensorFacts facts[NUM_TENSORS]
    cdef tuple kept         # aliases of the engine's tensors: while these lie there, no other's memory does
    cdef object engines     # the same by name
    cdef object given       # the tensors of metadata, by name
    cdef dict values        # of metadata; None: forgotten
    cdef dict own           # of metadata of a captured size: a step's own, beside ``values``, which all have
    cdef list host          # host arrays by place in the ring
    cdef str lengths
    cdef length_t counts[NUM_COUNTS]
    cdef length_t query_len
    cdef bint quiet

    def forget(self):
        """The engine's tensors lie elsewhere: what keeps their memory is let go."""
        self.values = self.own = self.kept = self.engines = self.given = self.host = None


@cython.final
cdef class KnownSteps:
    """Finds steps by their tensors, and fills them: addresses, shapes, strides, dtypes and devices are compared.

    ``capsule`` is torch's table of functions for DLPack, and ``tensor_type`` its class of tensors. ``ready`` are two
    functions, None without CUDA: whether a stream is capturing, and the current device, which must be
    ``device_index``. ``checks``: whether the host can read the tensors, which ``builder`` then does.
    """

    cdef read_tensor_t read
    cdef object tensor_type, storage_of, is_negative, metadata_type, owner, is_capturing, current_device
    cdef Entrance entrance
    cdef list rows, known
    cdef int device_index
    cdef bint uniform
    cdef public bint checks
    cdef object last_given, last_engines  # of the last step that ``quick`` built, as KnownStep has them
    cdef slot_t last_step, last_longest   # its number, and its longest row

    def __init__(self, capsule, tensor_type, metadata_type, Entrance entrance, owner, list rows,
                 length_t max_num_reqs, bint uniform, bint checks, ready, int device_index):
        self.read, self.tensor_type, self.metadata_type = tensor_reader(capsule), tensor_type, metadata_type
        self.storage_of, self.is_negative = tensor_type.untyped_storage, tensor_type.is_neg
        self.entrance, self.owner, self.rows, self.checks, self.last_step = entrance, owner, rows, checks, -1
        self.known = [None] * (max_num_reqs + 1)
        self.uniform, self.device_index = uniform, device_index
        self.is_capturing, self.current_device = ready or (None, None)

    def remember(self, tuple tensors, kept, given, dict values, list host, length_t query_len, bint quiet):
        """Finds later steps of ``tensors``; a KnownStep, or None where they cannot be read so.

        ``values`` are the metadata's, without its builder. ``quiet``: a step needs neither a plan nor a launch.
        """
        cdef KnownStep known = KnownStep.__new__(KnownStep)
        cdef Py_ssize_t i
        if self.read == NULL:
            return None
        for i in range(NUM_TENSORS):
            if not self.is_tensor(tensors[i], &known.facts[i]):
                return None
        if known.facts[SEQ_LENS].shape[0] >= len(self.known):  # another thread has resized it since
            return None
        for i in range(NUM_COUNTS):
            known.counts[i] = values[COUNT_NAMES[i]]
        known.kept, known.engines, known.given, known.values, known.host = tuple(kept), kept, given, values, host
        known.query_len, known.quiet = query_len, quiet
        known.lengths = values["lengths"]
        if known.counts[USE_CUDA_GRAPH]:
            known.own = self.own_of(values)
        self.known[known.facts[SEQ_LENS].shape[0]] = known
        return known

    cdef dict own_of(self, dict values):
        """What metadata has itself, where it finds the others in ``values`` once they are asked for."""
        cdef dict own = {"_shared": values, "step": 0, "builder": None, "_arrays": None, "_rows": None}
        for name in values:  # what the class says, too, is not looked for elsewhere
            if hasattr(self.metadata_type, name):
                own[name] = values[name]
        return own

    def last_built(self, step):
        """What fields of ``step`` are made of, as ``DeviceFields.restore`` takes it; None where ``quick`` did not build
        it.
        """
        if self.last_given is None or self.last_step != step:
            return None
        return self.last_given, self.last_engines, self.last_longest

    def forget(self):
        """Finds none of the steps so far: what is captured has changed."""
        cdef Py_ssize_t i
        for i in range(len(self.known)):
            self.known[i] = None

    def quick(self, builder, query_start_loc, seq_lens, block_table, slot_mapping, host_starts, host_lengths, bounded):
        """The next step, built; None, where nothing has changed, for one that is not known or has more to do."""
        cdef Entrance entrance = self.entrance
        cdef KnownStep known = self.find(seq_lens)
        if known is None or not known.quiet or entrance.state != FREE:
            return None
        begin(entrance)
        try:
            return self.fill(builder, known, query_start_loc, seq_lens, block_table, slot_mapping, host_starts,
                             host_lengths, bounded, True)
        finally:
            entrance.state = FREE

    def step(self, builder, query_start_loc, seq_lens, block_table, slot_mapping, host_starts, host_lengths, bounded):
        """The metadata of the next step, to be planned, for a caller inside; None where it is not known."""
        cdef KnownStep known = self.find(seq_lens)
        if known is None:
            return None
        return self.fill(builder, known, query_start_loc, seq_lens, block_table, slot_mapping, host_starts,
                         host_lengths, bounded, False)

    cdef KnownStep find(self, seq_lens):
        """What is known of steps of as many rows."""
        cdef TensorFacts facts
        cdef KnownStep known
        if self.read == NULL or not self.is_tensor(seq_lens, &facts) or facts.ndim != 1:
            return None
        if facts.shape[0] >= len(self.known):
            return None
        known = self.known[facts.shape[0]]
        return None if known is None or known.values is None else known

    cdef bint is_tensor(self, object tensor, TensorFacts* out):
        return type(tensor) is self.tensor_type and facts_of(self.read, tensor, out)

    cdef object fill(self, object builder, KnownStep known, object query_start_loc, object seq_lens,
                     object block_table, object slot_mapping, object host_starts, object host_lengths, object bounded,
                     bint quick):
        """The metadata of a step of these tensors; None where anything is not as it was: the longer way says what is
        wrong. ``quick``: the step is built, and its host arrays are filled when they are asked for.
        """
        cdef AdoptedRows rows
        cdef Py_ssize_t i, index
        cdef length_t count = <length_t> known.facts[SEQ_LENS].shape[0], row = 0
        cdef length_t counts[NUM_COUNTS]
        cdef slot_t step
        cdef dict values
        if self.is_capturing is not None and (self.is_capturing() or self.current_device() != self.device_index):
            return None
        if not (self.is_known(query_start_loc, known, QUERY_START_LOC) and self.is_known(seq_lens, known, SEQ_LENS)
                and self.is_known(block_table, known, BLOCK_TABLE)
                and self.is_known(slot_mapping, known, SLOT_MAPPING)):
            return None
        if self.checks:
            host_starts = query_start_loc if host_starts is None else host_starts
            host_lengths = seq_lens if host_lengths is None and bounded is False else host_lengths
            builder._check_known((query_start_loc, seq_lens, block_table, slot_mapping),
                                 (host_starts, host_lengths, bounded))
        if known.lengths != lengths_as(host_lengths, bounded):
            return None
        step = <slot_t> self.owner.last_step + 1
        index = step % len(self.rows)
        rows = self.rows[index]
        if not self.copy_host(host_starts, rows.starts, count + 1):
            return None
        if host_lengths is not None and not self.copy_host(host_lengths, rows.lengths, count):
            return None
        if rows.count_copies(count, host_lengths is not None, known.facts[SLOT_MAPPING].shape[0],
                             known.facts[BLOCK_TABLE].shape[1], known.query_len, self.uniform, False, counts,
                             &row) != OK:
            return None
        if (counts[NUM_REQS] != known.counts[NUM_REQS] or counts[NUM_TOKENS] != known.counts[NUM_TOKENS]
                or counts[USE_CUDA_GRAPH] != known.counts[USE_CUDA_GRAPH]):
            return None
        if self.checks:
            builder._check_known((query_start_loc, seq_lens, block_table, slot_mapping), None)
            if self.known[known.facts[SEQ_LENS].shape[0]] is not known:  # what torch ran has asked for a field, say
                return None
        values = PyDict_Copy(known.own if quick and known.own is not None else known.values)
        for i in range(USE_CUDA_GRAPH):
            if counts[i] != known.counts[i]:
                PyDict_SetItem(values, COUNT_NAMES[i], counts[i])
        values["step"], values["builder"], values["_arrays"] = step, builder, known.host[index]
        made = PyType_GenericAlloc(<PyTypeObject*> self.metadata_type, 0)
        # As Python does it. PyObject_GenericSetDict leaves attributes that lie in the object in force (CPython 3.13.0).
        PyObject_GenericSetAttr(made, "__dict__", values)
        if quick:
            values["_rows"] = rows
            self.owner.last_step = step
            self.last_given, self.last_engines = known.given, known.engines
            self.last_step, self.last_longest = step, counts[MAX_SEQ_LEN]
        else:
            rows.fill_copies(counts[NUM_REQS], host_lengths is not None)
        return made

    cdef bint is_known(self, object tensor, KnownStep known, Py_ssize_t i):
        """Whether a tensor is as the one that is known, and that one's memory is where it was."""
        cdef TensorFacts facts
        if not self.is_tensor(tensor, &facts) or not same_facts(&facts, &known.facts[i]):
            return False
        return self.is_tensor(known.kept[i], &facts) and facts.data == known.facts[i].data

    cdef bint copy_host(self, object given, length_t* out, length_t count) except *:
        """Copies int32[count] on the host; False where ``given`` is none, or no plain one."""
        cdef TensorFacts facts
        cdef const length_t[:] view
        cdef size_t at, size, nbytes = <size_t> count * sizeof(length_t)
        if type(given) is self.tensor_type:
            try:
                storage = self.storage_of(given)  # first: memory may be moved by what an allocation runs
                at, size = storage.data_ptr(), storage.nbytes()
            except RuntimeError:  # it has none, such as a sparse one
                return False
            if not facts_of(self.read, given, &facts) or not is_host_int32(&facts, count) or self.is_negative(given):
                return False
            if count:
                if <size_t> facts.data < at or <size_t> facts.data + nbytes > at + size:
                    return False
                memcpy(out, facts.data, nbytes)
            return True
        if type(given) is not ndarray or given.dtype is not HOST_INT32 or given.ndim != 1 or len(given) != count:
            return False
        view = given
        # Compiled code reads whole numbers at their addresses. Those of a field of records may be none of them.
        if count and (<size_t> &view[0] % sizeof(length_t) or view.strides[0] % <Py_ssize_t> sizeof(length_t)):
            return False
        copy_lengths(out, view, count)
        return True


cdef str lengths_as(object host_lengths, object bounded):
    """How metadata says what the host knows; None where ``bounded`` is no flag."""
    if bounded is False:
        return "none" if host_lengths is None else "exact"
    return "bounded" if bounded is True and host_lengths is not None else None
