# The C types of the kernels. length_t is for counts and lengths of tokens, rows and blocks, block_id_t and slot_t for
# values that address the cache. Sums over a batch are taken in slot_t and checked before they are narrowed.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

ctypedef int32_t length_t    # tokens, requests, blocks: always below 2**31
ctypedef int32_t block_id_t  # id of a KV-cache block
ctypedef int64_t slot_t      # block * block_size + offset, or PAD_SLOT_ID

cdef enum:
    MAX_INT32 = 0x7FFFFFFF
    MAX_GROUPS = 64         # KV-cache groups of a batch
    MAX_COLUMNS = 16        # columns of a builder
