from attncore._typedefs cimport block_id_t, length_t, slot_t


cdef struct BlockSize:
    length_t tokens
    int shift               # log2(tokens), -1 where it is no power of two


cdef enum:
    MAX_GROUPS = 64         # KV-cache groups of a batch


# What a decode row needs of one KV-cache group, so that it touches the table at block boundaries only. Arrays, not an
# array of rows: the loops over them are then the compiler's to vectorise.
cdef struct Rows:
    length_t* num_computed  # tokens in the cache; the same array in every group
    length_t* num_blocks    # ids held in the table's row
    length_t* column        # of the cached block, -1: none
    block_id_t* block       # table[row, column], never the null block
    length_t* synced        # leading columns that the device's table has
    length_t* stale         # scratch: rows whose cached block is not the current one
    length_t num_stale
    block_id_t* table       # [capacity, width]
    length_t width
    BlockSize size
    length_t null_ids       # ids below this are the null block's
    Rows* next              # another group of this block size: it shares ``column``, and its block is cached with ours
    bint follows            # whether this is such another group


# The arrays of a step that each KV-cache group has of its own.
cdef struct GroupFields:
    slot_t* slot_mapping
    length_t* paged_kv_indptr
    length_t* paged_kv_last_page_len
    length_t num_pages
    bint shares_pages       # an earlier group, of the same block size, fills the page lists


cdef struct Failure:
    length_t row
    length_t token
    length_t group


# Which tokens a rank keeps: turns of ``interleave`` tokens go to ranks 0, 1, ... of ``world``.
cdef struct Ranks:
    length_t world
    length_t rank
    length_t interleave


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


cdef class TableState:
    cdef object _keep
    cdef Rows rows
    cdef readonly length_t capacity, width, kernel_blocks
    cdef slot_t num_blocks
    cdef list _pass(self, length_t row, length_t column)


cdef class BatchState:
    cdef object _keep
    cdef length_t* num_computed
    cdef length_t* encoder_lens
    cdef length_t* encoder_done
    cdef Rows* decoders[MAX_GROUPS]
    cdef length_t num_decoders
    cdef Rows* cross
    cdef slot_t version         # how often the rows of a step were arranged
    cdef public length_t num_rows
    cdef public bint dirty
    cdef public slot_t changes  # how often blocks of rows changed place or went away
    cdef public length_t max_encoder_len
    cdef public object req_ids
    cdef readonly bint busy


cdef class StepArena:
    cdef object _keep
    cdef GroupFields groups[MAX_GROUPS + 1]
    cdef slot_t* positions
    cdef length_t* token_to_req_indices
    cdef length_t* query_start_loc
    cdef length_t* seq_start_loc
    cdef length_t* seq_lens
    cdef length_t* context_lens
    cdef length_t* query_lens
    cdef length_t* logits_indices
    cdef length_t* prefill_query_start_loc
    cdef length_t* prefill_seq_start_loc
    cdef length_t* encoder_seq_lens
    cdef length_t* encoder_query_lens
    cdef length_t* encoder_seq_start_loc
    cdef length_t* encoder_query_start_loc
    cdef length_t counting      # leading rows whose query_start_loc, logits_indices, ... already count 0, 1, 2, ...
    cdef slot_t version         # of the rows whose encoder fields are there
    cdef length_t encoder_reqs  # how many rows those are
    cdef readonly slot_t step
    cdef readonly length_t num_reqs, num_tokens, num_actual_reqs, num_actual_tokens
    cdef readonly length_t num_decodes, num_decode_tokens, num_prefills, num_prefill_tokens
    cdef readonly length_t max_query_len, max_seq_len, max_prefill_seq_len, max_decode_seq_len, max_decode_query_len
    cdef length_t max_prefill_query_len
    cdef readonly length_t num_encoder_tokens, max_encoder_seq_len, num_cross_slots
    cdef length_t num_seq_tokens
    cdef readonly slot_t changes
    cdef readonly object req_ids
    cdef public object moves
    cdef void _forget(self) noexcept


cdef class StepShape:
    cdef readonly list arenas, metadata
    cdef readonly bint pads, uniform
    cdef readonly length_t num_reqs, num_tokens, query_len, pad_seq_len
    cdef object _keep
    cdef list sources
    cdef char* device           # where a captured graph reads, or NULL
    cdef Py_ssize_t nbytes
    cdef public object size, replay   # what a device's side keeps of it
    cdef public bint recorded
    cdef public Py_ssize_t tail       # where the journal begins in an arena, bytes
    cpdef object commit(self, slot_t step)


cdef class StepSender:
    cdef object _keep
    cdef slot_t* arenas
    cdef Py_ssize_t depth
    cdef slot_t* receipt
    cdef Rows* groups[MAX_GROUPS + 1]
    cdef length_t num_groups, entries


cdef class StepKernel:
    cdef BatchState batch
    cdef StepShape eager
    cdef object _keep
    cdef length_t* query_lens
    cdef length_t* swaps
    cdef signed char* kinds
    cdef Py_ssize_t depth
    cdef length_t max_model_len, max_num_tokens, max_num_encoder_tokens, decode_threshold
    cdef Ranks ranks
    cdef list last              # by arena of the ring: the StepArena whose step it holds
    cdef readonly slot_t next_step
    cdef dict buckets
    cpdef object decode_step_inside(self, StepShape bucket)
    cdef object _run(self, StepShape bucket, length_t num_ones, length_t num_decodes, length_t num_reqs,
                     length_t longest_one)


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
