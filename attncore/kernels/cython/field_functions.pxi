# A function on host arrays for each of slot mapping, positions, block tables and page indices; the order of kinds.

from libc.string cimport memcpy, memset


# The arrays of these functions are a caller's, which another thread may write to after they were checked. Each number
# is read once, and what lies outside the arrays is refused here again: the answer is the first row at fault, or -1.
cdef inline bint has_room(slot_t start, slot_t count, slot_t room) noexcept nogil:
    """Whether start..start + count lies in 0..room."""
    return start >= 0 and count >= 0 and start + count <= room


cdef int check_columns(Py_ssize_t columns, Py_ssize_t stride) except -1:
    """ValueError for a rectangle of block ids whose rows are not contiguous: they are copied as runs of memory."""
    if columns > 1 and stride != sizeof(block_id_t):
        raise ValueError("block_table: its rows are not contiguous; give a copy")
    return 0


def fill_slot_mapping(const block_id_t[:, ::1] block_table, const length_t[::1] context_lens,
                      const length_t[::1] query_lens, length_t block_size, slot_t[::1] out):
    """slot_mapping of a rectangle of block ids: the first row with a token beyond its columns or ``out``, or -1."""
    cdef BlockSize block
    cdef length_t i, start, count
    cdef slot_t token = 0, held
    if block_size < 1:
        return 0
    block = block_size_of(block_size)
    held = min(<slot_t> block_table.shape[1] * block_size, <slot_t> MAX_INT32)
    for i in range(<length_t> query_lens.shape[0]):
        count = query_lens[i]
        if count == 0:
            continue
        if i >= context_lens.shape[0] or i >= block_table.shape[0]:
            return i
        start = context_lens[i]
        if not has_room(start, count, held) or not has_room(token, count, out.shape[0]):
            return i
        fill_slots(&out[token], &block_table[i, 0], start, start + count, block)
        token += count
    return -1


def fill_positions(const length_t[::1] context_lens, const length_t[::1] query_lens, slot_t[::1] positions,
                   length_t[::1] token_to_req_indices):
    """positions and token_to_req_indices of a batch, both int[num_tokens]: the first row beyond them, or -1."""
    cdef length_t i, count
    cdef slot_t token = 0, room = min(positions.shape[0], token_to_req_indices.shape[0])
    for i in range(<length_t> query_lens.shape[0]):
        count = query_lens[i]
        if count == 0:
            continue
        if i >= context_lens.shape[0] or not has_room(token, count, room):
            return i
        count_up(&positions[token], context_lens[i], count)
        repeat(&token_to_req_indices[token], i, count)
        token += count
    return -1


def fill_page_indices(const block_id_t[:, :] block_table, const length_t[::1] indptr, block_id_t[::1] out):
    """paged_kv_indices of a rectangle (rows contiguous): the first indptr[i + 1] - indptr[i] ids of every row.

    Returns the first row whose ids lie beyond its columns or ``out``, or -1.
    """
    cdef length_t i, start, count
    check_columns(block_table.shape[1], block_table.strides[1])
    for i in range(<length_t> indptr.shape[0] - 1):
        start = indptr[i]
        count = <length_t> max(min(<slot_t> indptr[i + 1] - start, <slot_t> MAX_INT32), -1)
        if count == 0:
            continue
        if i >= block_table.shape[0] or count > block_table.shape[1] or not has_room(start, count, out.shape[0]):
            return i
        memcpy(&out[start], &block_table[i, 0], count * sizeof(block_id_t))
    return -1


def fill_block_table(list rows not None, block_id_t[:, ::1] out):
    """Pads rows of block ids to the rectangle out with 0; the index of the first bad or missing row, or -1."""
    cdef object row
    cdef slot_t count, width = out.shape[1]
    cdef length_t i
    for i in range(<length_t> out.shape[0]):
        if i >= PyList_GET_SIZE(rows):  # reading a row may run the caller's code
            return i
        row = readable(rows[i])
        if width == 0:
            if row is None or len(row):
                return i
            continue
        count = read_ids(row, &out[i, 0], width, <slot_t> MAX_INT32 + 1)
        if count < 0:
            return i
        memset(&out[i, 0] + count, 0, (width - count) * sizeof(block_id_t))
    return -1


def classify(const length_t[::1] query_lens, const length_t[::1] context_lens, length_t decode_threshold,
             length_t extend_threshold, signed char[::1] kinds, slot_t[::1] counts):
    """The kind of each row into kinds (SPLIT_DECODE, ...); counts int64[6]: rows by kind, then tokens by kind.

    A row of more than decode_threshold tokens is an extend where it has context and at most extend_threshold tokens;
    without context_lens (of length 0) none is.
    """
    cdef length_t i, query_len
    cdef length_t num_rows[3]
    cdef slot_t num_tokens[3]
    cdef signed char kind
    cdef bint extends = context_lens.shape[0] >= query_lens.shape[0] > 0
    num_rows[:] = [0, 0, 0]
    num_tokens[:] = [0, 0, 0]
    for i in range(<length_t> query_lens.shape[0]):
        query_len = query_lens[i]
        kind = SPLIT_DECODE
        if query_len > decode_threshold:
            kind = SPLIT_PREFILL
            if extends and context_lens[i] and query_len <= extend_threshold:
                kind = SPLIT_EXTEND
        kinds[i] = kind
        num_rows[kind] += 1
        num_tokens[kind] += query_len
    for i in range(3):
        counts[i], counts[3 + i] = num_rows[i], num_tokens[i]


def order_kinds(signed char[::1] kinds, length_t[:, ::1] swaps):
    """The fewest swaps of rows that bring kinds 0, 1, 2 into order, in ``kinds`` too: how many are in swaps."""
    cdef length_t i, n = <length_t> kinds.shape[0], first = 0, second = 0
    for i in range(n):
        first += kinds[i] == 0
        second += kinds[i] == 1
    return plan_swaps(&kinds[0], n, first, second, &swaps[0, 0]) if n else 0
