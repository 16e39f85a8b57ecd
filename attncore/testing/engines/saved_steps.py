"""A file of saved steps, as ``attncore replay --save-steps`` writes it: the batches of it that are timed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attncore.input_files import read_file
from attncore.json_lines.list_builder import Batch, metadata_of, parse_batch

MAX_BYTES = 1 << 30
"""Of the file."""
MAX_STEPS = 32
"""Of a file: evenly spread over it."""


class SavedSteps(NamedTuple):
    """Batches of one block size, their blocks numbered from 0 on without gaps."""

    batches: list[Batch]
    num_blocks: int
    """Of the cache that they need."""


def read_steps(path: str | Path, *, every_line: bool = False) -> SavedSteps:
    """``parse_steps`` of a file; OSError where it cannot be read."""
    return parse_steps(path, read_bytes(path), every_line=every_line)


def read_bytes(path: str | Path) -> bytes:
    """What a file of steps holds; OSError, and ValueError, which begins with the file, where that is too much."""
    try:
        return read_file(path, MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def parse_steps(path: str | Path, data: bytes, *, every_line: bool = False) -> SavedSteps:
    """At most MAX_STEPS of what a file holds, which are built once; with ``every_line`` all its lines are, before.

    ValueError, which begins with the file and the line, where there is none or one is no batch.
    """
    lines = [(number, line) for number, line in enumerate(io.BytesIO(data), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty; it takes what `attncore replay --save-steps FILE` writes")
    chosen = {lines[i][0] for i in np.linspace(0, len(lines) - 1, min(MAX_STEPS, len(lines))).astype(int)}
    batches: list[Batch] = []
    for number, line in lines:
        if every_line or number in chosen:
            try:
                batch = _checked(line, batches[0].block_size if batches else None)
            except (ValueError, TypeError, MemoryError) as error:
                raise ValueError(f"{path}: line {number}: {str(error) or 'not enough memory'}") from error
            if number in chosen:
                batches.append(batch)
    return _renumbered(batches)


def _checked(line: bytes, block_size: int | None) -> Batch:
    """The batch of a line; ValueError or TypeError where the builder refuses it."""
    batch = parse_batch(line)
    if block_size not in (None, batch.block_size):
        raise ValueError(f"block_size: {batch.block_size} differs from {block_size} of the first line")
    metadata_of(batch)
    return batch


def _renumbered(batches: list[Batch]) -> SavedSteps:
    """The same with ids by rank, so that the cache has as many blocks as are named; block 0, often unused, stays."""
    tables = [one.block_table for batch in batches for group in batch.groups for one in group.sequences]
    tables += [group.cross_block_table for batch in batches for group in batch.groups]
    ranks = {one: rank for rank, one in enumerate(sorted({0}.union(*(table for table in tables if table is not None))))}

    def renumbered(batch: Batch) -> Batch:
        groups = [
            group._replace(
                sequences=[one._replace(block_table=_in(ranks, one.block_table)) for one in group.sequences],
                cross_block_table=_in(ranks, group.cross_block_table),
            )
            for group in batch.groups
        ]
        return batch._replace(groups=groups)

    return SavedSteps([renumbered(batch) for batch in batches], len(ranks))


def _in(ranks: dict[int, int], table: object) -> list[int] | None:
    return [ranks[one] for one in table] if isinstance(table, list) else None
