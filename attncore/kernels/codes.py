"""Numbers that the kernels share with Python, each declared once: codes of checks, pad values, words of an arena's
header, rows of the state of batches and tables. A test compares the C enums of kernels/cython with them.
"""

from __future__ import annotations

PAD_SLOT_ID = -1
"""The slot of a token that is not written to the cache."""

NO_COLUMN = -1
"""The cached column of a row whose current block is not cached."""

MOST_COMPARED = 512
"""Comparisons that a call which appends blocks may make to find one that its row has already, its neighbours apart."""

# Codes that a kernel's check returns.
OK, TOO_FEW_BLOCKS, NULL_BLOCK, TOO_LONG, TOO_MANY_TOKENS, TOO_MANY_SEQ_TOKENS = range(6)
HIT_ON_DECODE, HIT_WITH_WINDOW, CONTEXT_WITHOUT_CHUNKS, QUERY_TOO_LONG = range(6, 10)
TOO_MANY_ENCODER_TOKENS, QUERY_NOT_CAPTURED, ENCODER_NOT_CAPTURED, TOO_MANY_ROWS = range(10, 14)
# Of adopted steps, whose lengths an engine gives.
STARTS_NOT_AT_0, STARTS_FALL, TOO_SHORT, BEYOND_TABLE, TOO_FEW_SLOTS, SLOTS_NOT_PADDED = range(14, 20)
NO_TOKENS, GIVEN_TOKENS = 20, 21
"""Of a step: a column has no values for tokens that a row runs; of steps ahead, it has some that only the host knows.
"""
BEYOND_SIZE = 22
"""Of a step that is padded to a captured size: it has more tokens."""

# int64 words of an arena's header, before its first field.
HEADER_WORDS = 80
HEADER_LAUNCH, HEADER_ROWS, HEADER_TOKENS, HEADER_RUNNING, HEADER_AHEAD, HEADER_JOURNAL, HEADER_COUNTS = range(7)
"""Which launch reads it, its rows and tokens, its rows without padding, how many steps were launched ahead in all
before it, and the byte of the arena where its journal begins; from HEADER_COUNTS on, the journal entries of each group.

A launch has a number, 1 + the step's + HEADER_AHEAD. HEADER_LAUNCH has it in its upper bits and the journal's place, in
words of 8 bytes, in the LAUNCH_SHIFT lower ones; 0: no launch. It is written last, and one load sees both.
"""
LAUNCH_SHIFT = 28


def launch_word(number: int, journal: int) -> int:
    """HEADER_LAUNCH of the launch ``number`` over an arena whose journal begins at the byte ``journal``."""
    return number << LAUNCH_SHIFT | (journal // 8 & ((1 << LAUNCH_SHIFT) - 1))


# int64 words that host and device share: what the device has read, and, apart from them, what the host has launched.
RECEIPT_WORDS = 32
RECEIPT_STEP, RECEIPT_AHEAD = range(2)
"""The last step that the device has read, and how many steps it has run ahead in all."""
RECEIPT_LAUNCHED = 16
"""How many steps the host has launched ahead in all."""
JOURNAL_ENTRY_WORDS = 2
JOURNAL_INDEX, JOURNAL_BLOCK = range(JOURNAL_ENTRY_WORDS)
"""int32 words of a journal entry: a flat index into the table and a block id."""

# Rows of a batch's state int32[4, n], and of a table's int32[4, n].
COMPUTED, ENCODER_LENS, ENCODER_DONE, PLACE = range(4)
"""Computed tokens, encoder tokens, whether the encoder tokens are in the cache, the request's place in columns."""
NUM_BLOCKS, CACHED_COLUMN, CACHED_BLOCK, SYNCED = range(4)
"""Blocks held, column (or NO_COLUMN) and id of the cached block, leading columns that a device's table has."""

# Kinds of requests in a step, in the order of rows.
DECODE, PREFILL, REST = range(3)

# Kinds of a request in a batch that is split in three: short extends have a part of their own.
SPLIT_DECODE, SPLIT_EXTEND, SPLIT_PREFILL = range(3)
