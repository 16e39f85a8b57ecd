# The rows of a step that run one token each.
#
# These are a few loops, each over two or three arrays: short enough for the compiler to see that the arrays do not
# overlap, and to run four rows at once.

cdef extern from "kernels/cython/prefix_sum.h":
    length_t prefix_sum "attncore_prefix_sum"(const length_t* values, length_t* sums, length_t count,
                                              length_t* total) noexcept nogil


cdef inline length_t sum_up(const length_t* values, length_t* sums, length_t count) noexcept nogil:
    """sums[i + 1] is the sum of values[0..i] + 1; returns the last."""
    cdef length_t i, total = 0
    for i in range(prefix_sum(values, sums, count, &total), count):
        total += values[i] + 1
        sums[i + 1] = total
    return total


cdef inline void fill_decode_lengths(const length_t* computed, length_t* context_lens, length_t* seq_lens,
                                     length_t count) noexcept nogil:
    cdef length_t i
    for i in range(count):
        context_lens[i] = computed[i]
        seq_lens[i] = computed[i] + 1


cdef inline void fill_decode_slots(const block_id_t* block, const length_t* last_page_len, slot_t* slots,
                                   BlockSize size, length_t count) noexcept nogil:
    cdef length_t i
    cdef unsigned int tokens = size.tokens  # unsigned numbers widen in one instruction, and multiply in one
    if size.shift >= 0:
        for i in range(count):
            slots[i] = <slot_t> ((<unsigned long long> <unsigned int> block[i] << size.shift)
                                 + <unsigned int> last_page_len[i]) - 1
    else:
        for i in range(count):
            slots[i] = <slot_t> (<unsigned long long> <unsigned int> block[i] * tokens
                                 + <unsigned int> last_page_len[i]) - 1


cdef inline void fill_decode_pages(const length_t* computed, const length_t* column, length_t* last_page_len,
                                   BlockSize size, length_t count) noexcept nogil:
    cdef length_t i, mask = size.tokens - 1
    if size.shift >= 0:
        for i in range(count):
            last_page_len[i] = (computed[i] & mask) + 1
    else:
        for i in range(count):
            last_page_len[i] = computed[i] - column[i] * size.tokens + 1


cdef inline void fill_decode_blocks(GroupFields* out, const TableView* view, length_t count) noexcept nogil:
    """One group's part of a step in which rows 0..count run one token each."""
    if not out.shares_pages:
        fill_decode_pages(view.num_computed, view.column, out.paged_kv_last_page_len, view.size, count)
        out.num_pages = sum_up(view.column, out.paged_kv_indptr, count)
    fill_decode_slots(view.block, out.paged_kv_last_page_len, out.slot_mapping, view.size, count)


cdef inline void fill_decodes(StepArena out, BatchState batch, length_t count, length_t longest) noexcept nogil:
    """Fills rows 0..count, of one token each after at most ``longest``, but for the arrays of start_counting."""
    cdef length_t i, g, seq_start = 0
    cdef length_t* computed = batch.num_computed
    cdef slot_t* positions = out.positions
    fill_decode_lengths(computed, out.context_lens, out.seq_lens, count)
    for g in range(batch.num_decoders):
        fill_decode_blocks(out.groups + g, batch.decoders[g], count)
    for i in range(count):
        positions[i] = computed[i]
    seq_start = sum_up(computed, out.seq_start_loc, count)
    for i in range(count):
        computed[i] += 1
    out.max_decode_seq_len = longest + 1 if count else 0
    out.num_tokens, out.num_seq_tokens = count, seq_start


cdef inline void start_counting(StepArena out, length_t count) noexcept nogil:
    """Fills the arrays that count 0, 1, 2, ... A steady batch has them from the step before: nothing is written."""
    cdef length_t i
    for i in range(out.counting, count):
        out.query_start_loc[i + 1] = i + 1
        out.logits_indices[i] = i
        out.token_to_req_indices[i] = i
        out.query_lens[i] = 1
    if count > out.counting:
        out.counting = count
