from attncore._typedefs cimport block_id_t, length_t, slot_t


cdef struct BlockSize:
    length_t tokens
    int shift               # log2(tokens), -1 where it is no power of two


# What a decode row needs, 16 bytes of it, so that it touches the table at block boundaries only. Four arrays, not an
# array of rows: the loops over them are then the compiler's to vectorise.
cdef struct Rows:
    length_t* num_computed  # tokens in the cache
    length_t* num_blocks    # ids held in the table's row
    length_t* column        # of the cached block, -1: none
    block_id_t* block       # table[row, column], never the null block
    length_t* stale         # scratch: rows whose cached block is not the current one
    block_id_t* table       # [capacity, width]
    length_t width
    BlockSize size


# A row of the list door, between reading and filling.
cdef struct Entry:
    slot_t first_id         # where its block ids begin in the pool of ids
    length_t num_ids        # -1: null table (a profiling run)
    length_t query_len
    length_t context_len
    length_t kernel_len     # seq_len, capped for a windowed decode
    length_t row_start      # the ids that go to the kernel: row_start .. row_start + row_count of its own
    length_t row_count
    bint is_prompt
    bint hit


cdef class BlockRows:
    cdef object _keep
    cdef Rows rows
    cdef readonly length_t capacity, width
    cdef slot_t num_blocks
    cdef public length_t num_rows
    cdef public bint dirty
    cdef public slot_t changes  # how often blocks of rows changed place or went away
    cdef public object req_ids
    cdef bint busy


cdef class StepArena:
    cdef object _keep
    cdef slot_t* slot_mapping
    cdef slot_t* positions
    cdef length_t* token_to_req_indices
    cdef length_t* query_start_loc
    cdef length_t* seq_start_loc
    cdef length_t* seq_lens
    cdef length_t* context_lens
    cdef length_t* query_lens
    cdef length_t* logits_indices
    cdef block_id_t* last_blocks
    cdef length_t* paged_kv_indptr
    cdef length_t* paged_kv_last_page_len
    cdef length_t* prefill_query_start_loc
    cdef length_t* prefill_seq_start_loc
    cdef length_t counting  # leading rows whose query_start_loc, logits_indices, ... already count 0, 1, 2, ...
    cdef readonly slot_t step
    cdef readonly length_t num_reqs, num_tokens, num_decodes, num_prefills, num_prefill_tokens
    cdef readonly length_t max_query_len, max_seq_len, max_prefill_seq_len, max_decode_seq_len
    cdef readonly length_t num_pages, num_seq_tokens
    cdef readonly slot_t changes
    cdef readonly object req_ids
    cdef public object moves


cdef class StepKernel:
    cdef BlockRows rows
    cdef list arenas, metadata
    cdef object _keep
    cdef length_t* query_lens
    cdef length_t* swaps
    cdef Py_ssize_t depth
    cdef length_t max_model_len, max_num_tokens
    cdef readonly slot_t next_step
    cpdef object decode_step_inside(self)
    cdef object _run(self, length_t num_decodes, length_t num_reqs)


cdef class GroupReader:
    cdef Entry* entries
    cdef Py_ssize_t capacity
    cdef block_id_t* ids
    cdef slot_t ids_capacity, num_ids
    cdef readonly length_t num_seqs
    cdef bint busy
    cdef int _read_sequence(self, object sequence, bint is_prompt, bint hit) except -1
    cdef int _reserve_entries(self) except -1
    cdef int _reserve_ids(self, slot_t extra) except -1
