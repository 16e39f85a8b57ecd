"""The public names of ``attncore.kernels``: functions on host arrays, the choice of kernels, the pad value."""

from attncore.array_arguments import Int32Array, Int64Array
from attncore.kernels import KernelsName, load_kernels, why_kernels
from attncore.kernels.arrays import (
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
from attncore.kernels.codes import PAD_SLOT_ID

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
