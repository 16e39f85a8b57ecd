# Context parallelism: the lengths, slots and pages that one rank keeps of a step.

# Which tokens a rank keeps: turns of ``interleave`` tokens go to ranks 0, 1, ... of ``world``.
cdef struct Ranks:
    length_t world
    length_t rank
    length_t interleave


cdef inline length_t local_len(length_t seq_len, Ranks ranks) noexcept nogil:
    """How many of a request's first seq_len tokens this rank keeps."""
    cdef length_t turn = ranks.world * ranks.interleave
    cdef length_t rest = seq_len % turn - ranks.rank * ranks.interleave
    return seq_len // turn * ranks.interleave + min(max(rest, 0), ranks.interleave)


cdef inline void keep_local_slots(slot_t* slots, length_t num_tokens, length_t block_size, Ranks ranks) noexcept nogil:
    """Makes slots of blocks of ``block_size`` tokens those of this rank's part; the other ranks' tokens are padded."""
    cdef length_t t, offset, run, local_size = block_size // ranks.world
    cdef slot_t slot
    for t in range(num_tokens):
        slot = slots[t]
        offset = <length_t> (slot % block_size)
        run = offset // ranks.interleave
        slots[t] = PAD_SLOT_ID
        if run % ranks.world == ranks.rank:
            slots[t] = (slot // block_size * local_size + run // ranks.world * ranks.interleave
                        + offset % ranks.interleave)


cdef inline void keep_local_lengths(StepArena out, Ranks ranks) noexcept nogil:
    """Makes lengths, their prefix sums and maxima those of this rank's part."""
    cdef length_t i, seq_start = 0
    out.max_decode_seq_len = out.max_prefill_seq_len = 0
    for i in range(out.num_reqs):
        out.context_lens[i] = local_len(out.context_lens[i], ranks)
        out.seq_lens[i] = local_len(out.seq_lens[i], ranks)
        seq_start += out.seq_lens[i]
        out.seq_start_loc[i + 1] = seq_start
        if i < out.num_decodes:
            out.max_decode_seq_len = max(out.max_decode_seq_len, out.seq_lens[i])
        else:
            out.max_prefill_seq_len = max(out.max_prefill_seq_len, out.seq_lens[i])
            out.prefill_seq_start_loc[i - out.num_decodes + 1] = seq_start - out.seq_start_loc[out.num_decodes]
    out.num_seq_tokens = seq_start


cdef inline void keep_local_pages(StepArena out, GroupFields* group, length_t local_size) noexcept nogil:
    """Makes one group's page lists those of this rank's part, which has ``local_size`` tokens of a block."""
    cdef length_t i, pages = 0
    for i in range(out.num_reqs):
        pages += (out.seq_lens[i] + local_size - 1) // local_size
        group.paged_kv_indptr[i + 1] = pages
        group.paged_kv_last_page_len[i] = (out.seq_lens[i] - 1) % local_size + 1 if out.seq_lens[i] else 0
    group.num_pages = pages


cdef void keep_local(StepArena out, BatchState batch, Ranks ranks) noexcept nogil:
    """Makes slots, lengths and pages those of one rank's cache; a block has its tokens on all ranks together."""
    cdef length_t g
    for g in range(batch.num_decoders):
        keep_local_slots(out.groups[g].slot_mapping, out.num_tokens, batch.decoders[g].size.tokens, ranks)
    keep_local_lengths(out, ranks)
    for g in range(batch.num_decoders):
        if not out.groups[g].shares_pages:
            keep_local_pages(out, out.groups + g, batch.decoders[g].size.tokens // ranks.world)
