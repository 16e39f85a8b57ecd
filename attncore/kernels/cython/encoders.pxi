# Encoder lengths of a step, and the cross group's arrays.

cdef inline void fill_encoder_fields(StepArena out, BatchState batch, length_t num_reqs) noexcept nogil:
    """Fills the encoder arrays of rows 0..num_reqs and the cross group's; encoders that run now are done after it."""
    cdef length_t i, length, fresh, token = 0, seq_start = 0, longest = 0, pages = 0
    cdef TableView* view = batch.cross
    cdef GroupFields* group = out.groups + batch.num_decoders
    for i in range(num_reqs):
        length = batch.encoder_lens[i]
        fresh = 0 if batch.encoder_done[i] else length
        if fresh > out.max_cross_slots - token:  # a caller's check has failed: nothing is written beyond the array
            fresh = 0
        if fresh:
            fill_slots(group.slot_mapping + token, view.table + <slot_t> i * view.width, 0, length, view.size)
            batch.encoder_done[i] = 1
            token += fresh
        seq_start += length
        out.encoder_seq_lens[i] = length
        out.encoder_query_lens[i] = fresh
        out.encoder_seq_start_loc[i + 1] = seq_start
        out.encoder_query_start_loc[i + 1] = token
        longest = max(longest, length)
        group.paged_kv_last_page_len[i] = 0
        if length:
            pages += column_of(length - 1, view.size) + 1
            group.paged_kv_last_page_len[i] = offset_of(length - 1, view.size) + 1
        group.paged_kv_indptr[i + 1] = pages
    group.num_pages, out.max_encoder_seq_len = pages, longest
    out.num_encoder_tokens, out.num_cross_slots = seq_start, token


cdef void fill_encoder(StepArena out, BatchState batch, length_t num_reqs) noexcept nogil:
    """Fills encoder lengths of rows 0..num_reqs, and the slots of the encoder tokens that no earlier step has run.

    Nothing is written where neither rows nor their blocks have changed since this arena's last step.
    """
    if out.version == batch.version and out.changes == batch.changes and out.encoder_reqs == num_reqs:
        return
    fill_encoder_fields(out, batch, num_reqs)
    out.encoder_reqs = num_reqs
    # Encoders that ran are done: the next step in this arena writes their query lengths again.
    out.version = -1 if out.num_cross_slots else batch.version
