# The list builder's arrays, from the sequences that it has read.

from libc.string cimport memcpy, memset


cdef inline length_t count_masked(const Entry* entry, length_t window) noexcept nogil:
    """How many leading tokens of a sequence get no slot: all without a table, else those that left the window."""
    cdef slot_t before_window
    if entry.num_ids < 0:
        return entry.query_len
    if not window or not entry.is_prompt:
        return 0
    before_window = <slot_t> entry.query_len - window - entry.context_len
    return <length_t> min(max(before_window, 0), entry.query_len)


cdef inline void fill_entry_tokens(const Entry* entry, length_t i, const block_id_t* ids, BlockSize block,
                                   length_t window, slot_t* slots, slot_t* positions,
                                   length_t* token_to_req_indices) noexcept nogil:
    """Fills the arrays of tokens of sequence i."""
    cdef length_t k, masked = count_masked(entry, window)
    for k in range(masked):
        slots[k] = PAD_SLOT_ID
    if masked < entry.query_len:
        fill_slots(slots + masked, ids + entry.first_id, entry.context_len + masked,
                   entry.context_len + entry.query_len, block)
    count_up(positions, entry.context_len, entry.query_len)
    repeat(token_to_req_indices, i, entry.query_len)


cdef inline void fill_entries(const Entry* entries, length_t num_seqs, const block_id_t* ids, BlockSize block,
                              length_t window, slot_t[::1] slot_mapping, slot_t[::1] positions,
                              length_t[::1] token_to_req_indices, length_t[::1] seq_lens, length_t[::1] context_lens,
                              length_t[::1] query_lens, length_t[::1] query_start_loc, length_t[::1] seq_start_loc,
                              length_t[::1] logits_indices) noexcept nogil:
    """Fills the arrays that every dialect has."""
    cdef length_t i, token = 0, seq_start = 0
    cdef const Entry* entry
    query_start_loc[0] = seq_start_loc[0] = 0
    for i in range(num_seqs):
        entry = entries + i
        fill_entry_tokens(entry, i, ids, block, window, &slot_mapping[token], &positions[token],
                          &token_to_req_indices[token])
        token += entry.query_len
        seq_start += entry.kernel_len
        seq_lens[i] = entry.kernel_len
        context_lens[i] = entry.context_len
        query_lens[i] = entry.query_len
        query_start_loc[i + 1] = token
        seq_start_loc[i + 1] = seq_start
        logits_indices[i] = token - 1


cdef inline void pad_entries(length_t num_seqs, length_t pad, slot_t[::1] slot_mapping, slot_t[::1] positions,
                             length_t[::1] token_to_req_indices, length_t[::1] seq_lens,
                             length_t[::1] query_start_loc, length_t[::1] seq_start_loc) noexcept nogil:
    """Pads the arrays of tokens and lengths by ``pad`` rows of one token."""
    cdef length_t i, token = query_start_loc[num_seqs]
    for i in range(pad):
        slot_mapping[token + i] = PAD_SLOT_ID
        positions[token + i] = 0
        token_to_req_indices[token + i] = num_seqs + i
        seq_lens[num_seqs + i] = 1
        seq_start_loc[num_seqs + i + 1] = seq_start_loc[num_seqs + i] + 1


cdef inline void fill_entry_rows(const Entry* entries, length_t num_seqs, const block_id_t* ids,
                                 block_id_t[:, :] table) noexcept nogil:
    """Fills a block table, and zeros every row behind its ids."""
    cdef length_t i, count, width = <length_t> table.shape[1]
    if width == 0:
        return
    for i in range(<length_t> table.shape[0]):
        count = 0
        if i < num_seqs:
            count = min(entries[i].row_count, width)
            memcpy(&table[i, 0], ids + entries[i].first_id + entries[i].row_start, count * sizeof(block_id_t))
        memset(&table[i, 0] + count, 0, (width - count) * sizeof(block_id_t))


cdef inline void fill_entry_pages(const Entry* entries, length_t num_seqs, const block_id_t* ids, length_t block_size,
                                  length_t[::1] indptr, block_id_t[::1] indices,
                                  length_t[::1] last_page_len) noexcept nogil:
    """Fills page lists; requests beyond the sequences are empty."""
    cdef length_t i, needed, seq_len, pages = 0
    indptr[0] = 0
    for i in range(<length_t> last_page_len.shape[0]):
        last_page_len[i] = 0
        if i < num_seqs and entries[i].num_ids >= 0:
            seq_len = entries[i].context_len + entries[i].query_len
            needed = (seq_len - 1) // block_size + 1
            memcpy(&indices[0] + pages, ids + entries[i].first_id, needed * sizeof(block_id_t))
            pages += needed
            last_page_len[i] = (seq_len - 1) % block_size + 1
        indptr[i + 1] = pages
