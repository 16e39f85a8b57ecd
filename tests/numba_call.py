"""Calls of numba's kernels as programs, which compile one and those that it calls. ASK prints 21."""

ASK = """
from attncore.kernels import numba
import numpy as np
slots = np.zeros(1, np.int64)
numba.fill_slot_mapping(np.array([[5]], np.int32), np.array([1], np.int32), np.array([1], np.int32), 4, slots)
print(slots[0])
"""

ENTRY = """
from attncore.kernels.numba.block_table import find_missing
import numpy as np
state, out = np.ones((4, 1), np.int32), np.zeros(1, np.int32)
print(find_missing(np.array([4], np.int32), state, 4, 2, 1, out))
"""
"""A call of one of those that say that they are compiled; it prints 1."""
