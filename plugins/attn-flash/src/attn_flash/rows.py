"""The device's side of a part: its rows of the step's tables and lengths, cut once a step and kept for its layers."""

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


class _Kept(NamedTuple):
    table: Tensor
    lengths: Tensor
    rows: Rows


def rows_of(metadata: Any, part: Part, columns: int | None, *, cross: bool = False) -> Rows:
    """The rows of ``part``. ``columns``: how many of the table are enough, None for all.

    A slice of a tensor costs the host microseconds, a layer has little more. What was cut stays good for as long as the
    step's tensors are the same ones: builders keep their addresses, and make others where a shape changes.
    """
    table: Tensor = metadata.cross_block_table if cross else metadata.block_table
    lengths: Tensor = metadata.encoder_seq_lens if cross else metadata.seq_lens
    kept: dict[Any, _Kept] = metadata.__dict__.setdefault("_flash_rows", {})
    key = (part.first, part.last, columns, cross)
    found = kept.get(key)
    if found is not None and found.table is table and found.lengths is lengths:
        return found.rows
    sums: Tensor = metadata.encoder_seq_start_loc if cross else metadata.seq_start_loc
    starts: Tensor = metadata.query_start_loc
    rows = Rows(table, lengths, starts, sums, metadata.encoder_query_start_loc if cross else starts)
    if part.first or part.last < len(lengths):
        here, bounds = slice(part.first, part.last), slice(part.first, part.last + 1)
        rows = Rows(table[here], lengths[here], starts[bounds], sums[bounds], rows.fresh[bounds])
    if columns is not None and columns < table.shape[1]:
        rows = rows._replace(table=rows.table[:, :columns])
    if len(kept) > 16:  # of batches that were
        kept.clear()
    kept[key] = _Kept(table, lengths, rows)
    return rows
