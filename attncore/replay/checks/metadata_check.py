"""Compares the metadata of every k-th step with the oracle: the check of a replay without attention."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore.replay.checks.oracle import COUNTS, FIELDS, WHOLE, PlannedRow, Shard, expected
from attncore.show import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncore.builder import CommonAttentionMetadata
    from attncore.builder.persistent.kv_cache_group import KVCacheGroup
    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.results.measurements import Verification
    from attncore.replay.scheduling.step import Step


class MetadataCheck:
    """A comparison is one step, all fields of all groups and ranks together; it is the first step and every
    ``every``-th after it. ``groups`` have the block size of one rank; ``shards`` are the ranks, in order."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        every: int,
        result: Verification,
        *,
        threshold: int = 1,
        shards: Sequence[Shard] = (WHOLE,),
    ) -> None:
        self.groups = groups
        self.every = every
        self.result = result
        self.threshold = threshold
        self.shards = shards

    def __call__(self, number: int, step: Step, *ranks: StepMetadata) -> None:
        """Check step ``number``, the metadata of each rank; its requests stand as before it."""
        if number % self.every:
            return
        self.result.checked += 1
        sentences = []
        for index, group in enumerate(self.groups):
            planned = planned_rows(step, index)
            for shard, metadata in zip(self.shards, ranks, strict=True):
                of_group = metadata.groups[group.name] if len(self.groups) > 1 else metadata
                where = f"group {group.name}: " if len(self.groups) > 1 else ""
                where += f"rank {shard.rank}: " if len(ranks) > 1 else ""
                wrong = differences(of_group, planned, group.block_size, self.threshold, shard)
                sentences += [where + sentence for sentence in wrong]
        if sentences:
            self.result.fail(f"step {number}: {'; '.join(sentences)[:500]}")


def planned_rows(step: Step, group: int = 0) -> dict[int, PlannedRow]:
    """What the scheduler planned, by request, in the blocks of one group."""
    decodes = {
        running.row: PlannedRow(running.computed, 1 + step.draft(running).drafted, running.tables[group])
        for running in step.decodes
    }
    prefills = {
        running.row: PlannedRow(running.computed, count, running.tables[group]) for running, count in step.prefills
    }
    return decodes | prefills


def differences(
    metadata: CommonAttentionMetadata,
    planned: Mapping[Any, PlannedRow],
    block_size: int,
    threshold: int = 1,
    shard: Shard = WHOLE,
) -> list[str]:
    """One sentence for each field of ``metadata`` (host arrays) that is not what the oracle makes of ``planned``.

    ``planned`` has the rows of this step by request id, in any order.
    """
    req_ids = list(metadata.req_ids)
    if len(req_ids) != len(planned) or set(req_ids) != set(planned):
        return [f"req_ids: {counted(len(req_ids), 'row')} found, the step has {len(planned)}, or others"]
    rows = [planned[req_id] for req_id in req_ids]
    if any(first.query_len > threshold >= second.query_len for first, second in pairwise(rows)):
        return ["req_ids: a decode stands after a prefill"]
    wanted = expected(rows, block_size, threshold, shard)
    sentences = [
        f"{name}: {getattr(metadata, name)} found, {wanted[name]} expected"
        for name in COUNTS
        if getattr(metadata, name) != wanted[name]
    ]
    for name, dtype in FIELDS.items():
        sentences += _difference(name, getattr(metadata.host, name), np.array(wanted[name], dtype=dtype))
    return sentences + _table_differences(metadata.host.block_table, rows, block_size, shard)


def _difference(name: str, found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> list[str]:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return [f"{name}: {found.dtype}{list(found.shape)} found, {wanted.dtype}{list(wanted.shape)} expected"]
    wrong = np.flatnonzero(found != wanted)
    if not wrong.size:
        return []
    first = wrong[0]
    return [f"{name}: [{first}] is {found[first]}, {wanted[first]} expected ({wrong.size} of {wanted.size} differ)"]


def _table_differences(table: npt.NDArray[Any], rows: Sequence[PlannedRow], block_size: int, shard: Shard) -> list[str]:
    """A row holds the blocks of its tokens, then at most blocks the request holds for later, then zeros."""
    if table.dtype != np.int32 or table.ndim != 2 or len(table) != len(rows):
        return [f"block_table: {table.dtype}{list(table.shape)} found, int32 with {counted(len(rows), 'row')} expected"]
    for index, row in enumerate(rows):
        nonzero = np.flatnonzero(table[index])
        found = table[index][: nonzero[-1] + 1 if nonzero.size else 0].tolist()
        if len(found) < row.num_blocks(block_size, shard) or found != list(row.blocks[: len(found)]):
            return [f"block_table: row {index} is {_short(found)}, {_short(row.blocks)} expected"]
    return []


def _short(blocks: Sequence[int]) -> str:
    """A row in a message: its first blocks, and how many there are."""
    return f"{list(blocks[:6])} of {len(blocks)}"
