# SentAhead: steps ahead of a SentSteps, built and replayed in one call each.

cimport cython
from cpython.list cimport PyList_GET_SIZE
from cpython.object cimport PyObject


@cython.final
cdef class SentAhead:
    """Builds a step and books those behind it, and replays graphs over them, without the Python between.

    As with SentSteps, what is not plain is answered with None or False and changes nothing. ``make(shape, metadata,
    metadata, num_steps)`` makes the StepsAhead, which each of ``holders`` then has as its ``ahead``.
    """

    cdef SentSteps sent
    cdef object make, launch_of
    cdef tuple holders

    def __init__(self, SentSteps sent, make, tuple holders):
        self.sent, self.make, self.holders, self.launch_of = sent, make, holders, self.launch

    def run_ahead(self, num_steps, bucket, scheduled):
        """The StepsAhead of a step padded to ``bucket`` and ``num_steps - 1`` more; ``scheduled`` None: all requests.
        """
        cdef SentSteps sent = self.sent
        cdef StepKernel kernel = sent.kernel
        cdef BatchState batch = kernel.batch
        cdef object found = kernel.shapes.get(bucket) if type(bucket) is int else None
        cdef slot_t count
        if found is None or (scheduled is not None and type(scheduled) is not dict):
            return None
        if read_small_int(<PyObject*> num_steps, &count) == 0 or not 1 <= count <= kernel.max_model_len:
            return None
        if (<StepShape> found).query_len != 1 or kernel.ranks.world > 1 or sent._is_planned(found):
            return None
        if not sent._can_begin(found):
            return None
        begin(batch)
        try:
            steps = None
            if not sent._runs_spans(bucket):
                steps = self._run_ahead(<StepShape> found, scheduled, <length_t> count)
            batch.undo.clear()
            return steps
        except BaseException:
            batch.roll_back()
            raise
        finally:
            batch.state = UNFINISHED if PyList_GET_SIZE(batch.undo) else FREE

    cdef object _run_ahead(self, StepShape shape, dict scheduled, length_t num_steps):
        cdef StepSender sender = self.sent.sender
        cdef BatchState batch = self.sent.kernel.batch
        cdef object metadata, steps, holder
        cdef StepArena out
        cdef length_t i
        if not self._fits(shape, scheduled, num_steps):
            return None
        metadata = self.sent._build(shape, scheduled, 1)
        if metadata is None:
            return None
        steps = self.make(shape, metadata, metadata, num_steps)
        steps._launch = self.launch_of
        for holder in self.holders:
            batch.undo.append((setattr, holder, "ahead", holder.ahead))
            holder.ahead = steps
        # Behind what may fail: a roll-back takes one token back, and ``take_back`` of the side resets the sender.
        out = <StepArena> shape.arenas[self.sent._arena()]
        sender.start_ahead()
        for i in range(out.num_actual_reqs):
            batch.num_computed[i] += num_steps - 1
        return steps

    cdef bint _fits(self, StepShape shape, dict scheduled, length_t num_steps) except -1:
        """Whether every row that runs has all it needs for so many tokens; writes query_lens."""
        cdef StepKernel kernel = self.sent.kernel
        cdef BatchState batch = kernel.batch
        cdef Failure failure = Failure(0, 0, 0)
        cdef length_t i, running = 0
        cdef slot_t keys = 0
        if not self.sent._schedule(scheduled, 1):
            return False
        for i in range(batch.num_rows):
            if kernel.query_lens[i] > 1:
                return False
            if kernel.query_lens[i]:
                keys += <slot_t> batch.num_computed[i] + num_steps
                running += 1
            kernel.query_lens[i] *= num_steps
        if running > shape.num_reqs or keys > most_padded(shape, running):
            return False
        return kernel.check_step(&failure, True) == OK

    def launch(self, steps, graph, count):
        """Replays ``graph`` for the next ``count`` of ``steps``; False, and nothing done, where that is not plain."""
        cdef StepSender sender = self.sent.sender
        cdef object replay = getattr(graph, "replay", None)
        cdef StepShape shape = steps._shape
        cdef slot_t step = steps.step, done = steps._launched, total = steps._num_steps, each, target
        if replay is None or not sender.alone or not sender.ahead or self.sent.is_capturing():
            return False
        if read_small_int(<PyObject*> count, &each) == 0 or not 1 <= each <= total - done or not shape.recorded:
            return False
        target = sender.launched_before + done + each - 1
        if done:
            if self.sent.kernel.batch.changes != steps._changes or sender.receipt[RECEIPT_LAUNCHED] >= target:
                return False
        elif sender.pending != step or sender.published == step:
            return False
        else:
            sender.publish(step)
        sender.launch_ahead(target)
        replay()
        sender.note_sent(step, shape)
        sender.pending = -1
        if done + each > 1:  # what the host has of the step is no longer what the device has
            sender.last = -1
        steps._launched = done + each
        sender.ahead = done + each < total
        return True
