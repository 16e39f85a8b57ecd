# Entrance: one caller at a time, and what an interrupted one began is undone.

cimport cython
from cpython.list cimport PyList_GET_SIZE
from cpython.pythread cimport PyThread_get_thread_ident

import os

cdef enum:
    FREE = 0
    INSIDE = 1
    UNFINISHED = 2   # left by a caller whose changes could not all be undone; the next caller goes on with that

cdef tuple NOTHING = (bool,)
cdef int num_forks = 0
cdef list survivors = []  # by fork that this process came from: the thread that went on in the child


def after_fork():
    """Called in the child of a fork, which has none of the other threads: see ``settle_forked``."""
    global num_forks
    survivors.append(PyThread_get_thread_ident())
    num_forks += 1


os.register_at_fork(after_in_child=after_fork)


cdef class Entrance:
    """Lets one caller in at a time: ``with entrance.enter():``, and what is inside happens fully or not at all.

    Before each change the caller appends to ``undo`` how to take it back: a tuple (function, *arguments). The end of
    the block forgets these, an exception in it calls them, the last first. An exception may come between any two
    bytecodes (KeyboardInterrupt, out of a signal handler), and so inside these calls too: the next caller then goes on
    with them, for which each must be right to call twice. ``refused`` makes the error for a second caller. ``entered``
    tells those who read without entering whether a caller came in meanwhile.
    """

    cdef int state
    cdef int forks
    cdef unsigned long thread
    cdef slot_t num_callers  # that came in so far
    cdef readonly list undo
    cdef public object refused

    def __cinit__(self):
        self.state, self.undo, self.refused = FREE, [], RuntimeError

    @property
    def entered(self):
        """Another number once a caller came in."""
        return self.num_callers

    @property
    def busy(self):
        settle_forked(self)
        return self.state == INSIDE

    @property
    def unfinished(self):
        """Whether changes of an interrupted caller are to be undone, which ``enter`` does."""
        settle_forked(self)
        return self.state == UNFINISHED

    def enter(self):
        """The context manager of one caller; raises what ``refused`` makes where another is inside."""
        cdef Stay stay = Stay.__new__(Stay)  # first: an allocation may run other code
        settle_forked(self)
        if self.state == INSIDE:
            raise self.refused()
        begin(self)
        stay.entrance, stay.inside = self, True
        return stay

    def check_reader(self):
        """Raises what ``refused`` makes where another thread is inside; the caller's own may read."""
        settle_forked(self)
        if self.state == INSIDE and self.thread != PyThread_get_thread_ident():
            raise self.refused()

    def roll_back(self):
        """Undoes what this caller has changed so far."""
        while PyList_GET_SIZE(self.undo):
            action = self.undo[PyList_GET_SIZE(self.undo) - 1]
            action[0](*action[1:])
            # In C, right after the call: no exception comes between. ``pop`` may find no memory to shrink the list.
            self.undo[PyList_GET_SIZE(self.undo) - 1] = NOTHING
            self.undo.pop()


cdef inline void begin(Entrance entrance) noexcept:
    """Makes the caller the one inside. A direct call, which undoes nothing, sets the state FREE at its end."""
    entrance.state, entrance.forks = INSIDE, num_forks
    entrance.num_callers += 1
    entrance.thread = PyThread_get_thread_ident()


cdef inline void settle_forked(Entrance entrance) noexcept:
    """In the child of a fork, ends the call of a thread that is not there. A later thread may have its ident."""
    if entrance.state == INSIDE and entrance.forks != num_forks:
        if lives_on(entrance):
            entrance.forks = num_forks
        else:
            entrance.state = UNFINISHED if PyList_GET_SIZE(entrance.undo) else FREE


cdef bint lives_on(Entrance entrance) noexcept:
    """Whether each fork since the caller went inside was the caller's own."""
    cdef int fork
    for fork in range(entrance.forks, num_forks):
        if <unsigned long> survivors[fork] != entrance.thread:
            return False
    return True


@cython.final
@cython.freelist(4)
@cython.no_gc
cdef class Stay:
    """One caller's time inside. It ends with the object too: an interrupted caller may never reach ``__exit__``."""

    cdef Entrance entrance
    cdef bint inside

    def __enter__(self):
        self.entrance.roll_back()

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self.entrance.undo.clear()
            else:
                self.entrance.roll_back()
        finally:
            leave(self)

    def __dealloc__(self):
        leave(self)


cdef void leave(Stay stay) noexcept:
    if stay.inside:
        stay.inside = False
        stay.entrance.state = UNFINISHED if PyList_GET_SIZE(stay.entrance.undo) else FREE
