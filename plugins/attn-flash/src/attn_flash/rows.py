"""The device's side of a part: its rows of the step's tables and lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attn_flash.parts import Part


class Rows(NamedTuple):
    """Of n rows, on the device."""

    table: Tensor
    """int32 (n, columns)"""
    lengths: Tensor
    """int32 (n,): keys of each."""
    starts: Tensor
    """int32 (n + 1,): where their queries start among the step's."""
    sums: Tensor
    """int32 (n + 1,): sums of ``lengths``, from wherever they begin."""
    fresh: Tensor
    """int32 (n + 1,): where their keys of this step start among all of them."""


def rows_of(metadata: Any, part: Part, *, columns: int | None = None, cross: bool = False) -> Rows:
    """The rows of ``part``, views of the step's. ``columns``: how many of the table are enough, None for all."""
    starts: Tensor = metadata.query_start_loc
    if cross:
        table, lengths, sums = metadata.cross_block_table, metadata.encoder_seq_lens, metadata.encoder_seq_start_loc
        rows = Rows(table, lengths, starts, sums, metadata.encoder_query_start_loc)
    else:
        rows = Rows(metadata.block_table, metadata.seq_lens, starts, metadata.seq_start_loc, starts)
    if part.first or part.last < len(rows.lengths):
        here, bounds = slice(part.first, part.last), slice(part.first, part.last + 1)
        rows = Rows(rows.table[here], rows.lengths[here], starts[bounds], rows.sums[bounds], rows.fresh[bounds])
    if columns is not None and columns < rows.table.shape[1]:
        rows = rows._replace(table=rows.table[:, :columns])
    return rows
