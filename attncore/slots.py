"""Public functions on host arrays: slot mapping, positions, page indices; the choice of kernels, the pad value.

The functions, the kernels and the pad value are defined in ``attncore.kernels``, the types of arrays in
``attncore.array_arguments``.
"""

from attncore.array_arguments import Int32Array, Int64Array
from attncore.kernels import KernelsName, load_kernels, why_kernels
from attncore.kernels.codes import PAD_SLOT_ID
from attncore.kernels.host_functions import (
    build_logits_indices,
    build_page_lists,
    build_positions,
    build_query_start_loc,
    build_slot_mapping,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    is_block_tables_empty,
    pad_block_table,
)

__all__ = [
    "PAD_SLOT_ID",
    "Int32Array",
    "Int64Array",
    "KernelsName",
    "build_logits_indices",
    "build_page_lists",
    "build_positions",
    "build_query_start_loc",
    "build_slot_mapping",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "is_block_tables_empty",
    "load_kernels",
    "pad_block_table",
    "why_kernels",
]
