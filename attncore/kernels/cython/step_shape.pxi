# StepShape: one size of step, eager or captured, with its arenas and the number of rows it is padded to.

cimport cython
from libc.string cimport memcpy


@cython.final
cdef class StepShape:
    """A size of step: its arenas and their metadata. A step in arena k returns ``metadata[k]``.

    With ``pads`` (``num_reqs`` rows of ``query_len`` tokens, for a captured graph), steps of fewer rows get padded rows
    whose seq_lens are ``pad_seq_len``; ``uniform`` asks that every row runs ``query_len`` tokens. ``num_tokens``, where
    not 0, is how many the rows have in all, of whatever length. ``commit`` copies a step from its arena's bytes,
    ``sources``, to ``device`` (both uint8), where these are given.
    """

    cdef readonly list arenas, metadata
    cdef readonly bint pads, uniform
    cdef readonly length_t num_reqs, num_tokens, query_len, pad_seq_len
    cdef length_t max_rows      # of one token each, that its arenas have room for
    cdef object _keep
    cdef list sources           # their addresses: a step that is built is copied without an allocation
    cdef char* device           # where a captured graph reads, or NULL
    cdef Py_ssize_t nbytes
    cdef public object capacity, replay   # of the device's side: the Capacity, and what replays the step
    cdef public object bucket   # by which a captured size is known
    cdef public object plans    # a captured size's: the plans that its graph does not make itself; None: all
    cdef public bint recorded
    cdef public Py_ssize_t tail       # where the journal begins in an arena, bytes

    def __init__(self, list arenas, list metadata, bint pads=False, length_t num_reqs=0, length_t query_len=0,
                 length_t pad_seq_len=0, bint uniform=True, length_t num_tokens=0, list sources=None, device=None):
        cdef slot_t most = num_tokens if num_tokens else <slot_t> num_reqs * query_len
        cdef unsigned char[::1] memory, source
        cdef StepArena arena
        self.arenas, self.metadata = arenas, metadata
        self.max_rows = MAX_INT32
        for arena in arenas:
            self.max_rows = min(self.max_rows, arena.max_reqs, arena.max_tokens)
            if num_reqs > arena.max_reqs:
                raise ValueError(f"num_reqs: {num_reqs} exceed the {arena.max_reqs} that the arenas hold")
            if most > arena.max_tokens:
                what = f"num_tokens: {num_tokens}" if num_tokens else f"num_reqs: {num_reqs} of {query_len} tokens"
                raise ValueError(f"{what} exceed the {arena.max_tokens} that the arenas hold")
        self._keep = device, sources
        self.device = NULL
        if device is not None:
            memory = device
            self.device, self.nbytes, self.sources = <char*> &memory[0], memory.shape[0], []
            for source in sources:
                self.sources.append(<size_t> &source[0])
        self.pads, self.num_reqs, self.num_tokens = pads, num_reqs, <length_t> most
        self.query_len, self.pad_seq_len, self.uniform = query_len, pad_seq_len, uniform

    cpdef object commit(self, slot_t step):
        """Copies the arena of ``step`` to ``device``."""
        if self.device != NULL:
            memcpy(self.device, <char*> <size_t> self.sources[step % len(self.sources)], self.nbytes)
