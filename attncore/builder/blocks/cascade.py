"""Cascade attention: the keys of a prefix that many requests share are read once for all their queries.

In the first pass every query of the sharing requests attends to the prefix, without a mask; the second pass is causal
attention over the rest of each request. ``attncore.merge.merge_attention`` combines the two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.array_arguments import Int32Array, Int64Array
from attncore.kernels import host_functions
from attncore.quoted import quoted
from attncore.show import counted


class CascadeRule(NamedTuple):
    """When two passes are worth it: the least number of requests, the least prefix and the least saving.

    A second pass costs a launch and a merge of outputs. The defaults suit a large GPU; measure them on another.
    """

    min_requests: int = 8
    min_prefix_tokens: int = 256
    min_saving: float = 0.1
    """The fraction of all keys in the batch's contexts that need not be read again, 0 to 1."""


class SharedPrefix(NamedTuple):
    """A prefix that some requests of a batch share."""

    rows: Int32Array
    """int32[m]: the requests, ascending."""
    num_blocks: int
    """Leading blocks that their tables have in common, all filled with context."""
    num_tokens: int
    """Tokens of those blocks."""


class CascadePass(NamedTuple):
    """The arrays of one attention pass of n requests, on the host."""

    query_start_loc: Int32Array
    """int32[n + 1]: prefix sums of the query lengths."""
    seq_lens: Int32Array
    """int32[n]: keys of each request."""
    seq_start_loc: Int32Array
    """int32[n + 1]: prefix sums of seq_lens."""
    block_table: Int32Array
    """int32[n, width], padded with 0."""
    causal: bool
    """Whether a causal mask applies: in the second pass; the queries of the first come after all its keys."""


class Cascade(NamedTuple):
    """The two passes over a batch."""

    prefix: CascadePass
    """A single request: its queries are those of ``token_indices``, its keys the shared prefix."""
    suffix: CascadePass
    """The whole batch in its order; tables and lengths of the sharing requests begin after the prefix."""
    token_indices: Int64Array
    """int64[queries of the first pass]: their indices among the tokens of the step."""


def count_common_blocks(
    block_table: npt.ArrayLike, context_lens: npt.ArrayLike, block_size: int, *, null_block: int | None = None
) -> int:
    """The number of leading blocks that all requests share.

    ``block_table`` is int[n, width], ``context_lens`` int[n], in tokens; host arrays.

    Only blocks filled with context count, since every query must come after all of them. ``null_block``, where given
    (0 with the persistent builder), holds no keys and ends a prefix. 0 for an empty batch.
    """
    table, usable, _ = _count_usable_blocks(block_table, context_lens, block_size, null_block)
    if not len(table):
        return 0
    width = int(usable.min())
    differs = (table[:, :width] != table[0, :width]).any(axis=0)
    return int(differs.argmax()) if differs.any() else width


def find_shared_prefix(
    block_table: npt.ArrayLike,
    context_lens: npt.ArrayLike,
    block_size: int,
    rule: CascadeRule | None = None,
    *,
    null_block: int | None = None,
) -> SharedPrefix | None:
    """The requests whose shared prefix saves the most reading; None where no set of requests satisfies ``rule``.

    m requests that share p tokens save ``(m - 1) * p`` keys. Of equal savings the one with more requests is taken.
    Arguments as for ``count_common_blocks``; ``rule`` None is ``CascadeRule()``.
    """
    rule = _check_rule(CascadeRule() if rule is None else rule)
    block_size = arguments.integer("block_size", block_size, 1)
    table, usable, contexts = _count_usable_blocks(block_table, context_lens, block_size, null_block)
    if len(table) < rule.min_requests:
        return None
    order, common = _order_by_prefix(table, usable)
    min_blocks = max(1, -(-rule.min_prefix_tokens // block_size))
    best, start, stop, depth = 0, 0, 0, 0
    for first, last, blocks in _find_plateaus(common):
        requests, saved = last - first + 1, (last - first) * blocks
        if requests >= rule.min_requests and blocks >= min_blocks and (saved, requests) > (best, stop - start + 1):
            best, start, stop, depth = saved, first, last, blocks
    if not best or best * block_size < rule.min_saving * int(contexts.sum(dtype=np.int64)):
        return None
    return SharedPrefix(np.sort(order[start : stop + 1]).astype(np.int32), depth, depth * block_size)


def plan_cascade(
    shared: SharedPrefix,
    block_table: npt.ArrayLike,
    query_lens: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
) -> Cascade:
    """The two passes of a batch: ``block_table`` int[n, width], lengths int[n], on the host.

    Raises ValueError where ``shared`` is not a prefix of this batch's rows, or reaches into a request's queries.
    """
    if not isinstance(shared, SharedPrefix):
        raise TypeError(f"shared: {type(shared).__name__} found; give the SharedPrefix of find_shared_prefix")
    queries = array_arguments.lengths("query_lens", query_lens, 0)
    lens = array_arguments.lengths("seq_lens", seq_lens, 0)
    contexts = array_arguments.contexts(queries, lens)
    table = array_arguments.block_table(block_table, len(queries))
    given = array_arguments.as_array("shared.rows", shared.rows).copy()
    shared = _check_shared(shared, given, table, contexts)
    rows = given.astype(np.intp)

    starts = host_functions.build_query_start_loc(queries)
    row_lens = queries[rows]
    array_arguments.at_most("query_lens", int(row_lens.sum(dtype=np.int64)), array_arguments.MOST_TOKENS, "tokens")
    within = np.arange(int(row_lens.sum())) - np.repeat(np.cumsum(row_lens) - row_lens, row_lens)
    token_indices = np.repeat(starts[rows], row_lens) + within

    suffix_lens, suffix_table = lens.copy(), table.copy()
    suffix_lens[rows] -= shared.num_tokens
    kept = table.shape[1] - shared.num_blocks
    suffix_table[rows, :kept] = table.take(rows, axis=0)[:, shared.num_blocks :]
    suffix_table[rows, kept:] = 0
    prefix = CascadePass(
        np.array([0, len(token_indices)], np.int32),
        np.array([shared.num_tokens], np.int32),
        np.array([0, shared.num_tokens], np.int32),
        table[rows[:1], : shared.num_blocks].copy(),
        causal=False,
    )
    suffix = CascadePass(
        starts, suffix_lens, host_functions.build_query_start_loc(suffix_lens), suffix_table, causal=True
    )
    return Cascade(prefix, suffix, token_indices.astype(np.int64))


def _count_usable_blocks(
    block_table: npt.ArrayLike, context_lens: npt.ArrayLike, block_size: int, null_block: int | None
) -> tuple[Int32Array, npt.NDArray[np.int64], Int32Array]:
    """The table, for each row the number of leading blocks that are filled with context and not null, and the lengths
    of the contexts.
    """
    block_size = arguments.integer("block_size", block_size, 1)
    null_block = arguments.optional_integer("null_block", null_block, 0)
    contexts = array_arguments.lengths("context_lens", context_lens, 0)
    table = array_arguments.block_table(block_table, len(contexts))
    full = contexts.astype(np.int64) // block_size
    short = np.flatnonzero(full > table.shape[1])
    if len(short):
        row = int(short[0])
        raise ValueError(
            f"block_table: row {row} holds {counted(table.shape[1], 'block')} but its "
            f"{counted(contexts[row], 'token')} of context fill "
            f"{full[row]} (block_size {block_size})"
        )
    table = table[:, : int(full.max(initial=0))]
    if null_block is not None and table.size:
        null = table == null_block
        full = np.where(null.any(axis=1), np.minimum(full, null.argmax(axis=1)), full)
    return table, full, contexts


def _order_by_prefix(table: Int32Array, usable: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], list[int]]:
    """Rows sorted by their usable blocks, and how many leading blocks each shares with the next.

    In that order the rows that share a prefix are adjacent.
    """
    keys = [row[:count].astype(">i4").tobytes() for row, count in zip(table, usable.tolist(), strict=True)]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)
    a, b = order[:-1], order[1:]
    limits = np.minimum(usable[a], usable[b])
    common = []
    for row, other, limit in zip(a.tolist(), b.tolist(), limits.tolist(), strict=True):
        differs = table[row, :limit] != table[other, :limit]
        first = int(differs.argmax()) if limit else 0
        common.append(first if limit and differs[first] else limit)
    return order, common


def _find_plateaus(common: list[int]) -> list[tuple[int, int, int]]:
    """(first, last, depth) of every maximal run of sorted rows that share ``depth`` blocks, for each depth."""
    plateaus: list[tuple[int, int, int]] = []
    open_runs: list[tuple[int, int]] = []
    for index, depth in enumerate([*common, 0]):
        first = index
        while open_runs and open_runs[-1][1] >= depth:
            first, blocks = open_runs.pop()
            if blocks > depth:
                plateaus.append((first, index, blocks))
        if depth:
            open_runs.append((first, depth))
    return plateaus


def _check_rule(rule: CascadeRule) -> CascadeRule:
    if not isinstance(rule, CascadeRule):
        raise TypeError(f"rule: {quoted(rule)} is not a CascadeRule")
    rule = CascadeRule(
        arguments.integer("rule.min_requests", rule.min_requests, 2),
        arguments.integer("rule.min_prefix_tokens", rule.min_prefix_tokens, 1),
        rule.min_saving,
    )
    if isinstance(rule.min_saving, bool) or not isinstance(rule.min_saving, int | float):
        raise TypeError(f"rule.min_saving: {quoted(rule.min_saving)} is not a number")
    if not 0 <= rule.min_saving <= 1:
        raise ValueError(f"rule.min_saving: {rule.min_saving} is outside 0..1, the part of all keys")
    return rule


def _check_shared(
    shared: SharedPrefix, rows: npt.NDArray[np.integer], table: Int32Array, contexts: Int32Array
) -> SharedPrefix:
    """``shared`` with plain ints; ValueError or TypeError where it is no prefix of the batch's ``rows``."""
    if rows.size and rows.dtype.kind not in "iu":
        raise TypeError(f"shared.rows: {rows.dtype}{list(rows.shape)}; they are a list of integers")
    if rows.ndim != 1 or not rows.size or rows.min() < 0 or rows.max() >= len(table) or (rows[1:] <= rows[:-1]).any():
        raise ValueError(f"shared.rows: {rows.tolist()} are not ascending rows of this batch of {len(table)}")
    shared = SharedPrefix(
        shared.rows,
        arguments.integer("shared.num_blocks", shared.num_blocks, 1),
        arguments.integer("shared.num_tokens", shared.num_tokens, 1),
    )
    if shared.num_tokens % shared.num_blocks:
        raise ValueError(f"shared.num_tokens: {shared.num_tokens} are not {counted(shared.num_blocks, 'whole block')}")
    early = np.flatnonzero(contexts.take(rows) < shared.num_tokens)
    if len(early):
        row = int(rows[early[0]])
        raise ValueError(
            f"shared.num_tokens: {shared.num_tokens} reach into the queries of row {row}, whose context is "
            f"{counted(contexts[row], 'token')}"
        )
    blocks = table.take(rows, axis=0)[:, : shared.num_blocks]
    if blocks.shape[1] < shared.num_blocks or (blocks != blocks[0]).any():
        raise ValueError(f"shared.num_blocks: the rows do not share their first {counted(shared.num_blocks, 'block')}")
    return shared
