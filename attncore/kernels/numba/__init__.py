"""The kernels in numba, for a platform without a C compiler.

They have the topics, functions and classes of ``attncore/kernels/cython``, which say what each does; a test compares
the names. Loops are numba functions over NumPy arrays, compiled at first use and kept in numba's cache; what touches
Python objects is plain Python. Where C takes a struct, a loop here takes its arrays, and goes over the rows itself.
``attncore/_slots.pyi`` has the types.
"""

from attncore.kernels.numba.adopted_rows import AdoptedRows
from attncore.kernels.numba.batch import BatchState
from attncore.kernels.numba.block_table import TableState
from attncore.kernels.numba.columns import ColumnState
from attncore.kernels.numba.entrance import Entrance, Stay
from attncore.kernels.numba.field_functions import (
    classify,
    fill_block_table,
    fill_page_indices,
    fill_positions,
    fill_slot_mapping,
    order_kinds,
)
from attncore.kernels.numba.read_only import ReadOnly
from attncore.kernels.numba.sequence_groups import GroupReader
from attncore.kernels.numba.step import StepKernel
from attncore.kernels.numba.step_arena import StepArena
from attncore.kernels.numba.step_sender import StepSender
from attncore.kernels.numba.step_shape import StepShape

IMPLEMENTATION = "numba"
READS_INTS = "NumPy"

__all__ = [
    "IMPLEMENTATION",
    "READS_INTS",
    "AdoptedRows",
    "BatchState",
    "ColumnState",
    "Entrance",
    "GroupReader",
    "ReadOnly",
    "Stay",
    "StepArena",
    "StepKernel",
    "StepSender",
    "StepShape",
    "TableState",
    "classify",
    "fill_block_table",
    "fill_page_indices",
    "fill_positions",
    "fill_slot_mapping",
    "order_kinds",
]
