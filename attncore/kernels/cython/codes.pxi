# The numbers of attncore/kernels/codes.py for C. A test compares the two.

cdef enum:
    PAD_SLOT_ID = -1
    NO_COLUMN = -1
    MOST_COMPARED = 512

# What a check may answer.
cdef enum:
    OK = 0
    TOO_FEW_BLOCKS = 1
    NULL_BLOCK = 2
    TOO_LONG = 3
    TOO_MANY_TOKENS = 4
    TOO_MANY_SEQ_TOKENS = 5
    HIT_ON_DECODE = 6
    HIT_WITH_WINDOW = 7
    CONTEXT_WITHOUT_CHUNKS = 8
    QUERY_TOO_LONG = 9
    TOO_MANY_ENCODER_TOKENS = 10
    QUERY_NOT_CAPTURED = 11
    ENCODER_NOT_CAPTURED = 12
    TOO_MANY_ROWS = 13
    STARTS_NOT_AT_0 = 14
    STARTS_FALL = 15
    TOO_SHORT = 16
    BEYOND_TABLE = 17
    TOO_FEW_SLOTS = 18
    SLOTS_NOT_PADDED = 19
    NO_TOKENS = 20
    GIVEN_TOKENS = 21
    BEYOND_SIZE = 22

# Words of an arena's header, and of a journal entry.
cdef enum:
    HEADER_WORDS = 80
    HEADER_LAUNCH = 0
    HEADER_ROWS = 1
    HEADER_TOKENS = 2
    HEADER_RUNNING = 3
    HEADER_AHEAD = 4
    HEADER_JOURNAL = 5
    HEADER_COUNTS = 6
    LAUNCH_SHIFT = 28
    JOURNAL_ENTRY_WORDS = 2
    JOURNAL_INDEX = 0
    JOURNAL_BLOCK = 1

# Words that host and device share.
cdef enum:
    RECEIPT_WORDS = 32
    RECEIPT_STEP = 0
    RECEIPT_AHEAD = 1
    RECEIPT_LAUNCHED = 16

# Rows of a batch's state, and of a table's.
cdef enum:
    COMPUTED = 0
    ENCODER_LENS = 1
    ENCODER_DONE = 2
    PLACE = 3

cdef enum:
    NUM_BLOCKS = 0
    CACHED_COLUMN = 1
    CACHED_BLOCK = 2
    SYNCED = 3

# Kinds of a request in a step, and in a batch that is split in three.
cdef enum:
    DECODE = 0
    PREFILL = 1
    REST = 2

cdef enum:
    SPLIT_DECODE = 0
    SPLIT_EXTEND = 1
    SPLIT_PREFILL = 2
