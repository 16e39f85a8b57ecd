# The rows of a step that run any number of tokens: decodes of several, and prefills.

cdef inline void fill_blocks(GroupFields* out, TableView* view, length_t i, length_t token, length_t computed,
                             length_t seq_len) noexcept nogil:
    """Fills one group's arrays of row i, whose tokens computed..seq_len begin at ``token`` of the step."""
    fill_slots(out.slot_mapping + token, view.table + <slot_t> i * view.width, computed, seq_len, view.size)
    if not view.follows:
        cache_block(view, i, column_of(seq_len - 1, view.size))
    if not out.shares_pages:
        out.num_pages += view.column[i] + 1
        out.paged_kv_indptr[i + 1] = out.num_pages
        out.paged_kv_last_page_len[i] = seq_len - view.column[i] * view.size.tokens


cdef inline void fill_fields(StepArena out, length_t i, length_t token, length_t seq_start, length_t computed,
                             length_t query_len) noexcept nogil:
    """Fills the arrays that all groups share, of row i, which begins at ``token`` and ``seq_start`` of the step."""
    cdef length_t seq_len = computed + query_len
    count_up(out.positions + token, computed, query_len)
    repeat(out.token_to_req_indices + token, i, query_len)
    out.query_lens[i] = query_len
    out.context_lens[i] = computed
    out.seq_lens[i] = seq_len
    out.query_start_loc[i + 1] = token + query_len
    out.seq_start_loc[i + 1] = seq_start + seq_len
    out.logits_indices[i] = token + query_len - 1


cdef inline void rebase_prefills(StepArena out, length_t num_decodes, length_t stop, length_t decode_tokens,
                                 length_t decode_seqs) noexcept nogil:
    """Fills the prefix sums of rows num_decodes..stop alone, which begin with 0."""
    cdef length_t i
    out.prefill_query_start_loc[0] = 0
    out.prefill_seq_start_loc[0] = 0
    for i in range(num_decodes, stop):
        out.prefill_query_start_loc[i - num_decodes + 1] = out.query_start_loc[i + 1] - decode_tokens
        out.prefill_seq_start_loc[i - num_decodes + 1] = out.seq_start_loc[i + 1] - decode_seqs


cdef void fill_rows(StepArena out, BatchState batch, length_t start, length_t num_decodes, length_t stop,
                    const length_t* query_lens) noexcept nogil:
    """Fills rows start..stop, of query_lens[row] tokens each, behind ``start`` decodes of one token."""
    cdef length_t i, g, computed, query_len, seq_len, token = start, seq_start = out.num_seq_tokens
    cdef length_t decode_tokens = start, decode_seqs = seq_start
    if out.counting > start:
        out.counting = start
    for i in range(start, stop):
        query_len = query_lens[i]
        computed = batch.num_computed[i]
        seq_len = computed + query_len
        for g in range(batch.num_decoders):
            fill_blocks(out.groups + g, batch.decoders[g], i, token, computed, seq_len)
        fill_fields(out, i, token, seq_start, computed, query_len)
        batch.num_computed[i] = seq_len
        token += query_len
        seq_start += seq_len
        if i < num_decodes:
            decode_tokens, decode_seqs = token, seq_start
            out.max_decode_query_len = max(out.max_decode_query_len, query_len)
            out.max_decode_seq_len = max(out.max_decode_seq_len, seq_len)
        else:
            out.max_prefill_query_len = max(out.max_prefill_query_len, query_len)
            out.max_prefill_seq_len = max(out.max_prefill_seq_len, seq_len)
    rebase_prefills(out, num_decodes, stop, decode_tokens, decode_seqs)
    out.num_decode_tokens, out.num_tokens, out.num_seq_tokens = decode_tokens, token, seq_start
