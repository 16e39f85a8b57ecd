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


def build_steps():
    """A step of each builder, for which numba compiles nearly all: before workers would do it at the same time."""
    from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup

    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16, kernels="numba")
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("a", [1, 2], 3)
    builder.build({"a": 2})
    CommonMetadataBuilder(16, kernels="numba").build([SequenceGroup(False, [Sequence(0, 1, 3, [1])])])


if __name__ == "__main__":
    build_steps()
