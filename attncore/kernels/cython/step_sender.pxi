# StepSender: a step's header and the journal of its block tables, written to the arena; reads the receipt.

cimport cython

cdef extern from "kernels/cython/device_word.h":
    void store_word "attncore_store"(slot_t* word, slot_t value) noexcept nogil
    slot_t load_word "attncore_load"(slot_t* word) noexcept nogil


@cython.final
cdef class StepSender:
    """Writes the header and the journal of a step into its arena, for a device, and reads the receipt that comes back.

    ``arenas`` int64[depth]: addresses of the arenas; ``groups``: the TableState of each group; ``entries``: how many
    journal entries an arena has room for; ``receipt`` int64[RECEIPT_WORDS]: what the device has read, and the host
    launched.
    """

    cdef object _keep
    cdef slot_t* arenas
    cdef Py_ssize_t depth
    cdef slot_t* receipt
    cdef TableView* tables[MAX_GROUPS + 1]
    cdef length_t num_tables, entries
    cdef public slot_t sent             # the last step that was sent; -1: none
    cdef public slot_t pending          # the step that waits for the replay of its graph; -1: none
    cdef public object pending_shape    # its StepShape
    cdef public slot_t last           # the last step that was sent, also where it was taken back
    cdef readonly object last_shape     # its StepShape
    cdef public bint alone              # whether nothing is sent beside an arena
    cdef public bint ahead              # whether steps ahead are left, so that no step can be built
    cdef readonly slot_t published      # the last step whose header was; a replay of it was interrupted where it waits
    cdef readonly slot_t launched_before    # what the host had launched ahead in all before these

    def __init__(self, arenas, list groups, length_t entries, receipt):
        cdef slot_t[::1] addresses = arenas
        cdef slot_t[::1] word = receipt
        cdef TableState table
        if word.shape[0] < RECEIPT_WORDS:
            raise ValueError(f"receipt: {word.shape[0]} words found, {RECEIPT_WORDS} needed")
        self._keep = arenas, groups, receipt
        self.arenas, self.depth, self.receipt = &addresses[0], addresses.shape[0], &word[0]
        self.num_tables, self.entries = 0, entries
        self.sent = self.pending = self.last = self.published = -1
        self.alone, self.ahead, self.launched_before = True, False, 0
        for table in groups:
            self.tables[self.num_tables] = &table.view
            self.num_tables += 1

    def write(self, slot_t step, StepShape shape, StepArena out, length_t num_rows):
        """Writes a step's rows, tokens and journal: how many entries. Where all room is taken, there may be more."""
        return self.write_journals(shape, out, step, num_rows)

    cdef length_t write_journals(self, StepShape shape, StepArena out, slot_t step, length_t num_rows) noexcept:
        cdef char* arena = <char*> <size_t> self.arenas[step % self.depth]
        cdef slot_t* header = <slot_t*> arena
        cdef length_t* entries = <length_t*> (arena + shape.tail)
        cdef length_t g, count, total = 0
        header[HEADER_ROWS], header[HEADER_TOKENS] = out.num_reqs, out.num_tokens
        header[HEADER_RUNNING], header[HEADER_AHEAD] = out.num_actual_reqs, self.receipt[RECEIPT_LAUNCHED]
        header[HEADER_JOURNAL] = shape.tail
        for g in range(self.num_tables):
            count = write_journal(self.tables[g], num_rows, entries + JOURNAL_ENTRY_WORDS * total, self.entries - total)
            header[HEADER_COUNTS + g] = count
            total += count
        return total

    cpdef object publish(self, slot_t step):
        """Writes the launch's number, behind everything else: from now on the device may read the step."""
        cdef slot_t* header = <slot_t*> <size_t> self.arenas[step % self.depth]
        cdef slot_t place = header[HEADER_JOURNAL] // 8 & ((<slot_t> 1 << LAUNCH_SHIFT) - 1)
        self.published = step
        store_word(header + HEADER_LAUNCH, (1 + step + header[HEADER_AHEAD]) << LAUNCH_SHIFT | place)

    cpdef object withdraw(self, slot_t step):
        """Takes the launch's number out of the header of ``step``."""
        self.published = -1
        store_word(<slot_t*> <size_t> self.arenas[step % self.depth] + HEADER_LAUNCH, 0)

    cpdef object note_sent(self, slot_t step, shape):
        """Notes that ``step`` was sent, in ``shape``."""
        self.sent = self.last = step
        self.last_shape = shape

    def seen(self, slot_t step):
        """Whether the device has read ``step``."""
        return load_word(self.receipt + RECEIPT_STEP) >= step

    def launch(self, slot_t step, graph):
        """Publishes ``step`` and replays its graph; False, and nothing done, where it does not wait for that."""
        cdef object replay = getattr(graph, "replay", None)
        if replay is None or not self.alone or self.ahead:
            return False
        if step != self.pending or not (<StepShape> self.pending_shape).recorded:
            return False
        if self.published == step:
            return False
        self.publish(step)
        replay()
        self.note_sent(step, self.pending_shape)
        self.pending = -1
        return True

    cpdef object start_ahead(self):
        """Notes that the step that was built is the first of several."""
        self.launched_before, self.ahead = self.receipt[RECEIPT_LAUNCHED], True

    cpdef object launch_ahead(self, slot_t count):
        """Writes how many steps were launched ahead in all: the device may run as many from now on."""
        store_word(self.receipt + RECEIPT_LAUNCHED, count)
