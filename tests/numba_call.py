"""A call of one of numba's kernels as a program, which compiles it and those that it calls; it prints 21."""

ASK = """
from attncore.kernels import numba
import numpy as np
slots = np.zeros(1, np.int64)
numba.fill_slot_mapping(np.array([[5]], np.int32), np.array([1], np.int32), np.array([1], np.int32), 4, slots)
print(slots[0])
"""
