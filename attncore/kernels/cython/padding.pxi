# Pads a step's rows and tokens up to a captured size.

cdef inline void pad_rows(StepArena out, StepShape shape) noexcept nogil:
    """Pads the arrays that all groups share, from the step's rows to the shape's."""
    cdef length_t i
    for i in range(out.num_reqs, shape.num_reqs):
        out.seq_lens[i] = shape.pad_seq_len
        out.context_lens[i] = out.query_lens[i] = out.logits_indices[i] = 0
        out.query_start_loc[i + 1] = out.num_tokens
        out.seq_start_loc[i + 1] = out.seq_start_loc[i] + shape.pad_seq_len


cdef inline void pad_encoder(StepArena out, StepShape shape) noexcept nogil:
    """Pads the encoder arrays."""
    cdef length_t i
    for i in range(out.num_reqs, shape.num_reqs):
        out.encoder_seq_lens[i] = shape.pad_seq_len
        out.encoder_query_lens[i] = 0
        out.encoder_seq_start_loc[i + 1] = out.encoder_seq_start_loc[i] + shape.pad_seq_len
        out.encoder_query_start_loc[i + 1] = out.encoder_query_start_loc[i]
        out.max_encoder_seq_len = max(out.max_encoder_seq_len, shape.pad_seq_len)


cdef inline void pad_pages(StepArena out, GroupFields* group, StepShape shape) noexcept nogil:
    """Pads one group's page lists: padded rows have no pages."""
    cdef length_t i
    for i in range(out.num_reqs, shape.num_reqs):
        group.paged_kv_indptr[i + 1] = group.num_pages
        group.paged_kv_last_page_len[i] = 0


cdef inline void pad_tokens(StepArena out, length_t num_decoders, StepShape shape) noexcept nogil:
    """Pads the arrays of tokens: position 0 of the last row, in no slot of any group."""
    cdef length_t t, g
    for g in range(num_decoders):
        for t in range(out.num_tokens, shape.num_tokens):
            out.groups[g].slot_mapping[t] = PAD_SLOT_ID
    for t in range(out.num_tokens, shape.num_tokens):
        out.positions[t] = 0
        out.token_to_req_indices[t] = shape.num_reqs - 1


cdef void pad_step(StepArena out, BatchState batch, StepShape shape) noexcept nogil:
    """Pads a step to its shape; the arena's counts are then the shape's."""
    cdef length_t g, num_groups = batch.num_decoders + (batch.cross != NULL)
    cdef bint has_padded_rows = out.num_reqs < shape.num_reqs
    out.counting = min(out.counting, out.num_reqs)
    pad_rows(out, shape)
    if batch.cross != NULL:
        pad_encoder(out, shape)
    for g in range(num_groups):
        if not out.groups[g].shares_pages:
            pad_pages(out, out.groups + g, shape)
    pad_tokens(out, batch.num_decoders, shape)
    out.num_reqs, out.num_tokens, out.num_decode_tokens = shape.num_reqs, shape.num_tokens, shape.num_tokens
    out.max_decode_query_len = shape.query_len
    out.max_decode_seq_len = max(out.max_decode_seq_len, out.max_prefill_seq_len,
                                 shape.pad_seq_len if has_padded_rows else 0)
    # A graph tells prefills from decodes by nothing: all are rows of up to query_len tokens.
    out.num_prefills = out.num_prefill_tokens = out.max_prefill_query_len = out.max_prefill_seq_len = 0
