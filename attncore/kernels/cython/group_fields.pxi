# The list builder's arrays, from the sequences that it has read.


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
