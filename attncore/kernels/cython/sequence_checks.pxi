# The list builder's checks of the sequences that it has read, and what it counts of them.

from libc.string cimport memset


# A sequence of the list builder, between reading and filling.
cdef struct Entry:
    slot_t seq_id
    slot_t first_id         # where its block ids begin in the pool of ids
    length_t num_ids        # -1: null table (a profiling run)
    length_t query_len
    length_t context_len
    length_t kernel_len     # seq_len, capped for a windowed decode
    length_t row_start      # the ids that go to the kernel: row_start .. row_start + row_count of its own
    length_t row_count
    bint is_prompt
    bint hit


cdef inline length_t capped_len(length_t seq_len, length_t window, length_t block_size) noexcept nogil:
    """The length that a windowed decode shows the kernel: whole blocks of the window and the started one."""
    cdef slot_t cap = <slot_t> ((window - 1) // block_size + 1) * block_size + seq_len % block_size
    return seq_len if seq_len < cap else <length_t> cap


cdef inline length_t check_entry(const Entry* entry, length_t block_size, length_t window, bint chunked_prefill,
                                 bint multi_token_decode) noexcept nogil:
    """Whether the caller's settings allow such a sequence, and its table holds every token: a code."""
    if entry.is_prompt:
        if entry.hit and window:
            return HIT_WITH_WINDOW
        if entry.context_len and not chunked_prefill and not entry.hit:
            return CONTEXT_WITHOUT_CHUNKS
    elif entry.hit:
        return HIT_ON_DECODE
    elif entry.query_len > 1 and not multi_token_decode:
        return QUERY_TOO_LONG
    if entry.num_ids >= 0 and (entry.context_len + entry.query_len - 1) // block_size >= entry.num_ids:
        return TOO_FEW_BLOCKS
    return OK


cdef inline length_t first_missing(const Entry* entry, length_t block_size, length_t window) noexcept nogil:
    """The first token that needs a block beyond a table that is too short."""
    cdef length_t token = max(entry.context_len, entry.num_ids * block_size)
    if entry.is_prompt and window:
        token = max(token, entry.query_len - window)
    return token


cdef inline void settle_entry(Entry* entry, length_t block_size, length_t window, bint keeps_prompts) noexcept nogil:
    """Settles what the kernel gets of a checked sequence: its length, and its ids.

    ``keeps_prompts``: the ids of prompts too.
    """
    cdef length_t seq_len = entry.context_len + entry.query_len
    cdef length_t needed = (seq_len - 1) // block_size + 1
    cdef bint capped = window and not entry.is_prompt
    entry.kernel_len = capped_len(seq_len, window, block_size) if capped else seq_len
    entry.row_start = entry.row_count = 0
    if entry.num_ids < 0:
        return
    if capped:
        entry.row_count = min((window - 1) // block_size + 1 + (seq_len % block_size != 0), needed)
        entry.row_start = needed - entry.row_count
    elif not entry.is_prompt or keeps_prompts:
        entry.row_count = entry.num_ids


cdef length_t settle_entries(Entry* entries, length_t num_seqs, length_t block_size, length_t window,
                             bint chunked_prefill, bint hit_anywhere, bint multi_token_decode,
                             Failure* failure) noexcept nogil:
    """Checks and settles every sequence: a code, and where it failed (``failure.row``, ``failure.token``)."""
    cdef length_t i, code
    cdef bint keeps_prompts = chunked_prefill
    for i in range(num_seqs):
        keeps_prompts |= hit_anywhere and entries[i].hit
    for i in range(num_seqs):
        code = check_entry(entries + i, block_size, window, chunked_prefill, multi_token_decode)
        if code != OK:
            failure.row = i
            failure.token = first_missing(entries + i, block_size, window) if code == TOO_FEW_BLOCKS else 0
            return code
        settle_entry(entries + i, block_size, window, keeps_prompts or entries[i].hit)
    return OK


cdef struct GroupTotals:
    slot_t num_tokens
    slot_t num_seq_tokens
    length_t num_prefills
    slot_t num_prefill_tokens
    length_t width
    slot_t pages
    length_t max_query_len
    length_t max_prefill_seq_len
    length_t max_decode_seq_len
    length_t max_decode_query_len
    length_t longest


cdef GroupTotals count_entries(const Entry* entries, length_t num_seqs, length_t block_size) noexcept nogil:
    """Sums and maxima of settled sequences."""
    cdef GroupTotals totals
    cdef const Entry* entry
    cdef length_t i, seq_len
    memset(&totals, 0, sizeof(GroupTotals))
    totals.max_decode_query_len = 1
    for i in range(num_seqs):
        entry = entries + i
        seq_len = entry.context_len + entry.query_len
        if entry.is_prompt:
            totals.num_prefills += 1
            totals.num_prefill_tokens += entry.query_len
            totals.max_prefill_seq_len = max(totals.max_prefill_seq_len, seq_len)
        else:
            totals.max_decode_seq_len = max(totals.max_decode_seq_len, entry.kernel_len)
            totals.max_decode_query_len = max(totals.max_decode_query_len, entry.query_len)
        if entry.num_ids >= 0:
            totals.pages += (seq_len - 1) // block_size + 1
        totals.width = max(totals.width, entry.row_count)
        totals.longest = max(totals.longest, entry.kernel_len)
        totals.max_query_len = max(totals.max_query_len, entry.query_len)
        totals.num_tokens += entry.query_len
        totals.num_seq_tokens += entry.kernel_len
    return totals
