# TableState: the block table of one KV-cache group, and what the device has not got of it.

cimport cython
from libc.string cimport memset


# One KV-cache group's table and state in C. A decode reads the cached block, and the table at block boundaries only.
# The state is arrays, not an array of structs, so that the compiler can vectorise the loops over them.
cdef struct TableView:
    length_t* num_computed  # tokens in the cache; the same array in every group
    length_t* num_blocks    # ids held in the table's row
    length_t* column        # of the cached block, or NO_COLUMN
    block_id_t* block       # table[row, column], never the null block
    length_t* synced        # leading columns that the device's table has
    length_t* stale         # scratch: rows whose cached block is not the current one
    length_t num_stale
    block_id_t* table       # [capacity, width]
    length_t width
    BlockSize size
    length_t null_ids       # ids below this are the null block's
    TableView* next         # another group of this block size: it shares ``column``, and its block is cached with ours
    bint follows            # whether this is such another group


cdef inline void cache_block(TableView* view, length_t i, length_t column) noexcept nogil:
    """Caches the block at ``column`` as the current block of row i, in this group and its followers."""
    if column != view.column[i]:
        view.column[i] = column
        while view != NULL:
            view.block[i] = view.table[<slot_t> i * view.width + column]
            view = view.next


cdef inline void cache_stale_blocks(TableView* view) noexcept nogil:
    """Caches the current blocks of the rows that find_stale found."""
    cdef length_t k, i
    for k in range(view.num_stale):
        i = view.stale[k]
        cache_block(view, i, column_of(view.num_computed[i], view.size))


cdef inline void cache_decode_blocks(TableView* view, length_t count) noexcept nogil:
    """Caches the blocks of the next tokens of rows 0..count."""
    cdef length_t i
    for i in range(count):
        cache_block(view, i, column_of(view.num_computed[i], view.size))


cdef inline length_t find_missing(const TableView* view, length_t num_rows, length_t* out) noexcept nogil:
    """Writes the rows whose next token has no block, but has a column for one, into out: how many they are."""
    cdef length_t i, column, count = 0
    for i in range(num_rows):
        column = column_of(view.num_computed[i], view.size)
        if view.num_blocks[i] <= column < view.width:
            out[count] = i
            count += 1
    return count


cdef inline void exchange_lengths(length_t* values, length_t i, length_t j) noexcept nogil:
    cdef length_t value = values[i]
    values[i] = values[j]
    values[j] = value


cdef void swap_blocks(TableView* view, length_t i, length_t j) noexcept nogil:
    """Exchanges rows i and j of one group: ids, state, and the watermarks, which fall to 0."""
    cdef block_id_t* a = view.table + <slot_t> i * view.width
    cdef block_id_t* b = view.table + <slot_t> j * view.width
    cdef length_t k, count = view.num_blocks[i]
    cdef block_id_t block
    if view.num_blocks[j] > count:
        count = view.num_blocks[j]
    for k in range(count):
        block = a[k]
        a[k] = b[k]
        b[k] = block
    exchange_lengths(view.num_blocks, i, j)
    if not view.follows:
        exchange_lengths(view.column, i, j)
    exchange_lengths(view.block, i, j)
    view.synced[i] = view.synced[j] = 0


cdef length_t write_journal(TableView* view, length_t num_rows, length_t* entries, length_t room) noexcept nogil:
    """TableState.journal for C: at most ``room`` entries."""
    cdef length_t i, column, count = 0
    cdef length_t* entry = entries
    for i in range(num_rows):
        column = view.synced[i]
        if column >= view.num_blocks[i]:
            continue
        while column < view.num_blocks[i] and count < room:
            entry[JOURNAL_INDEX] = i * view.width + column
            entry[JOURNAL_BLOCK] = view.table[<slot_t> i * view.width + column]
            entry += JOURNAL_ENTRY_WORDS
            count += 1
            column += 1
        view.synced[i] = column
    return count


cdef bint stands(const TableView* view, length_t row, length_t start, length_t passed, length_t each) noexcept nogil:
    """Whether every block of a row from column ``start`` on can stand there.

    The null block can before column ``passed``. Another one stands once: it is compared with the one before it, and
    with all before it where that takes MOST_COMPARED comparisons at most, so that it costs little beside reading them.
    """
    cdef const block_id_t* ids = view.table + <slot_t> row * view.width
    cdef length_t stop = view.num_blocks[row], column, k
    cdef block_id_t bad = 0
    # Without an early exit: the compiler makes vectors of these loops.
    for k in range(max(start, passed), stop):
        bad |= ids[k] < each
    for k in range(max(start, each), stop):
        bad |= (ids[k] == ids[k - each]) & (ids[k] >= each)
    if <slot_t> (stop - start) * stop <= MOST_COMPARED:
        column = start
        while column < stop:
            for k in range(column):
                bad |= (ids[k] == ids[column]) & (ids[k] >= each)
            column += each
    return not bad


@cython.final
cdef class TableState:
    """One KV-cache group's blocks: state int32[4, n] and block table int32[n, width], both owned by the caller.

    Rows of the state are NUM_BLOCKS, CACHED_COLUMN, CACHED_BLOCK and SYNCED (see codes); ``stale`` int32[n] is scratch.
    A manager block is ``kernel_blocks`` columns. A row's table is always zero beyond its blocks.
    """

    cdef object _keep
    cdef TableView view
    cdef readonly length_t capacity, width, kernel_blocks
    cdef slot_t num_blocks

    def __init__(self, state, stale, table, length_t block_size, slot_t num_blocks, length_t kernel_blocks):
        cdef length_t[:, ::1] values = state
        cdef length_t[::1] scratch = stale
        cdef block_id_t[:, ::1] ids = table
        self._keep = state, stale, table
        self.view = TableView(NULL, &values[NUM_BLOCKS, 0], &values[CACHED_COLUMN, 0], &values[CACHED_BLOCK, 0],
                              &values[SYNCED, 0], &scratch[0], 0, &ids[0, 0], <length_t> ids.shape[1],
                              block_size_of(block_size), kernel_blocks, NULL, False)
        self.capacity, self.width = <length_t> ids.shape[0], <length_t> ids.shape[1]
        self.num_blocks, self.kernel_blocks = num_blocks, kernel_blocks

    def start(self, length_t row):
        """Empties a row's state for a request that begins there."""
        check_row(row, self.capacity)
        self.view.num_blocks[row] = self.view.block[row] = 0
        self.view.column[row] = NO_COLUMN

    def num_columns(self, length_t row):
        """The ids that a row holds."""
        check_row(row, self.capacity)
        return self.view.num_blocks[row]

    def append(self, length_t row, ids, length_t passed):
        """Appends block ids to a row: how many, or -1 where one is bad or the row is full, -2 where one cannot stand
        there; then nothing has changed.

        The null block may stand before column ``passed``; -1: the row held the ids before, and nothing is compared.
        """
        check_row(row, self.capacity)
        cdef length_t k, e, held = self.view.num_blocks[row], room = self.width - held, each = self.kernel_blocks
        cdef block_id_t* tail = self.view.table + <slot_t> row * self.width + held
        cdef block_id_t first
        cdef slot_t count = -1
        if exceeds(ids, room // each):
            return -1
        try:
            count = read_ids(readable(ids), tail, room // each, self.num_blocks)
        finally:
            if count < 0:
                memset(tail, 0, room * sizeof(block_id_t))
        if count < 0:
            return -1
        if each > 1:
            for k in range(<length_t> count - 1, -1, -1):
                first = tail[k] * each
                for e in range(each):
                    tail[k * each + e] = first + e
        self.view.num_blocks[row] = held + <length_t> count * each
        if passed >= 0 and not stands(&self.view, row, held, passed, each):
            self.view.num_blocks[row] = held
            memset(tail, 0, room * sizeof(block_id_t))
            return -2
        return count

    def truncate(self, length_t row, length_t num_blocks):
        """Keeps the first num_blocks ids of a row."""
        check_row(row, self.capacity)
        if not 0 <= num_blocks <= self.view.num_blocks[row]:
            return
        cdef block_id_t* ids = self.view.table + <slot_t> row * self.width
        memset(ids + num_blocks, 0, (self.view.num_blocks[row] - num_blocks) * sizeof(block_id_t))
        self.view.num_blocks[row] = num_blocks
        self.view.synced[row] = min(self.view.synced[row], num_blocks)
        if self.view.column[row] >= num_blocks:
            self.view.column[row] = NO_COLUMN

    def replace(self, length_t row, length_t column, block_id_t block):
        """Puts another id in a column that the row holds."""
        check_row(row, self.capacity)
        check_row(column, self.view.num_blocks[row])
        self.view.table[<slot_t> row * self.width + column] = block
        self.view.synced[row] = min(self.view.synced[row], column)
        if self.view.column[row] == column:
            self.view.column[row] = NO_COLUMN

    def needs_block(self, length_t num_rows, length_t[::1] out):
        """Writes the rows whose next token has no block, but has a column for one, into out: how many they are."""
        check_row(num_rows, min(self.capacity, <length_t> out.shape[0]) + 1)
        return find_missing(&self.view, num_rows, &out[0]) if num_rows else 0

    def pass_windows(self, length_t num_rows, length_t window, length_t num_rollback, list released):
        """Replaces blocks that windows have passed by the null block; adds (row, index of the first, ids) to released.

        These are whole manager blocks before what a query sees after num_rollback tokens are taken back. A row whose
        passed blocks are null already costs one comparison.
        """
        cdef length_t row, column, computed, each = self.kernel_blocks
        check_row(num_rows, self.capacity + 1)
        for row in range(num_rows):
            computed = max(self.view.num_computed[row] - num_rollback, 0)
            column = column_of(max(computed - window + 1, 0), self.view.size)
            column = min(column, self.view.num_blocks[row]) // each * each - each
            if column >= 0 and self.view.table[<slot_t> row * self.width + column] >= self.view.null_ids:
                self._pass(row, column, released)

    cdef int _pass(self, length_t row, length_t column, list released) except -1:
        """Replaces the manager block at ``column``, and those before it down to a null one."""
        cdef length_t e, first = column, each = self.kernel_blocks
        cdef block_id_t* ids = self.view.table + <slot_t> row * self.width
        cdef list passed = []
        while first >= 0 and ids[first] >= self.view.null_ids:
            passed.append(ids[first] // each)
            first -= each
        passed.reverse()
        released.append((row, first // each + 1, passed))
        while column >= 0 and ids[column] >= self.view.null_ids:
            for e in range(each):
                ids[column + e] = e
            if column <= self.view.column[row] < column + each:
                self.view.column[row] = NO_COLUMN
            self.view.synced[row] = min(self.view.synced[row], column)
            column -= each
        return 0

    def journal(self, length_t num_rows, length_t[::1] entries):
        """Writes the columns that a device's table lacks, a flat index and an id each: how many entries were written.

        Raises each row's watermark to what was written. What does not fit into entries is left for the next call.
        """
        cdef length_t room = <length_t> (entries.shape[0] // JOURNAL_ENTRY_WORDS)
        return write_journal(&self.view, num_rows, &entries[0], room) if room else 0

    def forget_synced(self):
        """Lowers every watermark: the next journals send the whole table again."""
        cdef length_t i
        for i in range(self.capacity):
            self.view.synced[i] = 0
