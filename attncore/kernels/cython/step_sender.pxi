# StepSender: a step's header and the journal of its block tables, written to the arena; reads the receipt.

cimport cython

cdef extern from "kernels/cython/device_word.h":
    void store_word "attncore_store"(slot_t* word, slot_t value) noexcept nogil
    slot_t load_word "attncore_load"(slot_t* word) noexcept nogil


@cython.final
cdef class StepSender:
    """Writes the header and the journal of a step into its arena, for a device, and reads the receipt that comes back.

    ``arenas`` int64[depth]: addresses of the arenas; ``groups``: the TableState of each group; ``entries``: how many
    journal entries an arena has room for; ``receipt`` int64[1]: the last step that the device has read.
    """

    cdef object _keep
    cdef slot_t* arenas
    cdef Py_ssize_t depth
    cdef slot_t* receipt
    cdef TableView* tables[MAX_GROUPS + 1]
    cdef length_t num_tables, entries

    def __init__(self, arenas, list groups, length_t entries, receipt):
        cdef slot_t[::1] addresses = arenas
        cdef slot_t[::1] word = receipt
        cdef TableState table
        self._keep = arenas, groups, receipt
        self.arenas, self.depth, self.receipt = &addresses[0], addresses.shape[0], &word[0]
        self.num_tables, self.entries = 0, entries
        for table in groups:
            self.tables[self.num_tables] = &table.view
            self.num_tables += 1

    def write(self, slot_t step, StepShape shape, StepArena out, length_t num_rows):
        """Writes a step's rows, tokens and journal: how many entries. Where all room is taken, there may be more."""
        cdef char* arena = <char*> <size_t> self.arenas[step % self.depth]
        cdef slot_t* header = <slot_t*> arena
        cdef length_t* entries = <length_t*> (arena + shape.tail)
        cdef length_t g, count, total = 0
        header[HEADER_ROWS], header[HEADER_TOKENS] = out.num_reqs, out.num_tokens
        for g in range(self.num_tables):
            count = write_journal(self.tables[g], num_rows, entries + JOURNAL_ENTRY_WORDS * total, self.entries - total)
            header[HEADER_COUNTS + g] = count
            total += count
        return total

    def publish(self, slot_t step):
        """Writes the step's number, behind everything else: from now on the device may read the step."""
        store_word(<slot_t*> <size_t> self.arenas[step % self.depth] + HEADER_STEP, step)

    def seen(self, slot_t step):
        """Whether the device has read ``step``."""
        return load_word(self.receipt) >= step
