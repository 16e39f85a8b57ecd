"""A step cut into segments: runs of rows that one call of a library attends.

Which rows go together follows from host arrays and integers alone. A segment's tensors are views of the step's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncore import AttentionMetadata

Entry = Literal["decode", "paged", "packed"]


class Segment(NamedTuple):
    """Rows ``first:last`` of a step, n in number, and its tokens ``start:stop``."""

    entry: Entry
    """Which call attends it. ``decode``: rows of ``query_len`` tokens each over the cache; ``paged``: rows of any
    lengths over the cache; ``packed``: rows of any lengths over this step's keys alone.
    """
    first: int
    last: int
    start: int
    stop: int
    query_len: int
    """Tokens of a row, for ``decode``."""
    max_query_len: int
    """Bounds of the lengths, for every replay of a captured graph too."""
    max_seq_len: int

    block_table: Tensor
    """int32 (n, columns), on the device like all that follow."""
    lengths: Tensor
    """int32 (n,): keys of each row."""
    query_starts: Tensor
    """int32 (n + 1,): where their queries start among the step's."""
    key_sums: Tensor
    """int32 (n + 1,): sums of ``lengths``, from wherever they begin."""
    key_starts: Tensor
    """int32 (n + 1,): where their keys of this step start among all of them."""
    num_keys: int = 0
    """Keys of this step up to the last one of these rows, for ``packed``."""

    def packed_keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows of this step's keys and values that a ``packed`` call may see. Kernels of generations 3 and 4 load
        whole tiles, and multiply the values behind a row's last key by 0: of padding those may be NaN.
        """
        count = self.num_keys
        return tuple([part if part.shape[0] == count else part[:count] for part in tensors])

    @property
    def tokens(self) -> slice:
        """Its tokens among the step's."""
        return slice(self.start, self.stop)

    def with_columns(self, columns: int) -> Segment:
        """The segment with the first ``columns`` of its table alone."""
        if columns >= self.block_table.shape[1]:
            return self
        return self._replace(block_table=self.block_table[:, :columns])

    def with_a_key_each(self) -> Segment:
        """The segment with one key at least in each row, of block 0 where a row has none."""
        table = self.block_table
        if not table.shape[1]:
            table = table.new_zeros((len(table), 1))
        lengths = self.lengths.clamp(min=1)
        sums = self.key_sums.new_zeros(self.key_sums.shape)
        torch.cumsum(lengths, 0, out=sums[1:])
        longest = max(1, self.max_seq_len)
        return self._replace(block_table=table, lengths=lengths, key_sums=sums, max_seq_len=longest)


class _Rows(NamedTuple):
    """What segments of a step are cut out of: the tensors of all its rows."""

    block_table: Tensor
    lengths: Tensor
    query_starts: Tensor
    key_sums: Tensor
    key_starts: Tensor

    def segment(
        self, entry: Entry, first: int, last: int, start: int, stop: int, *, query_len: int = 0, max_query_len: int,
        max_seq_len: int, num_keys: int = 0,
    ) -> Segment:  # fmt: skip
        table, lengths, query_starts, key_sums, key_starts = self
        if first or last < len(lengths):
            rows, bounds = slice(first, last), slice(first, last + 1)
            table, lengths = table[rows], lengths[rows]
            query_starts, key_sums, key_starts = query_starts[bounds], key_sums[bounds], key_starts[bounds]
        return Segment(
            entry, first, last, start, stop, query_len, max_query_len, max_seq_len,
            table, lengths, query_starts, key_sums, key_starts, num_keys,
        )  # fmt: skip


def decoder_segments(
    metadata: AttentionMetadata, *, block_size: int, together: bool, windowed: bool, cached: bool = False
) -> tuple[Segment, ...]:
    """The segments of a step in a causal layer. Together they hold every row once; those of whole steps' tokens
    (``paged``, ``packed``) come first.

    ``together``: the library attends decodes and prefills in one paged call as well as in two. ``windowed``: the layer
    has a window. ``cached``: keys of this step are read in the cache, too, wherever a row has a table. In a step whose
    table has no columns no row has one: all keys are new. ValueError beginning with ``metadata`` for a step whose keys
    are neither all in the cache nor all new.
    """
    starts = metadata.query_start_loc
    rows = _Rows(metadata.block_table, metadata.seq_lens, starts, metadata.seq_start_loc, starts)
    num_reqs, num_tokens, num_prefills = metadata.num_reqs, metadata.num_tokens, metadata.num_prefills
    bounds_of_rows = metadata.host.query_start_loc
    if not metadata.block_table.shape[1]:
        bounds = {"max_query_len": metadata.max_query_len, "max_seq_len": metadata.max_query_len}
        return (rows.segment("packed", 0, num_reqs, 0, num_tokens, **bounds, num_keys=int(bounds_of_rows[-1])),)
    if not num_prefills:
        return (_decodes(metadata, rows, 0, num_reqs, 0, num_tokens, metadata.max_seq_len),)
    num_decodes, num_decode_tokens = num_reqs - num_prefills, num_tokens - metadata.num_prefill_tokens
    longest_query = metadata.max_query_len
    if together and num_decodes and not metadata.from_groups:
        longest = metadata.max_seq_len
        return (
            rows.segment("paged", 0, num_reqs, 0, num_tokens, max_query_len=longest_query, max_seq_len=longest),
        )  # fmt: skip
    first, start = (num_decodes, num_decode_tokens) if metadata.decodes_first else (0, 0)
    last, stop = first + num_prefills, start + metadata.num_prefill_tokens
    found = [
        rows.segment(
            entry,
            *where,
            max_query_len=longest_query,
            max_seq_len=metadata.max_prefill_seq_len,
            num_keys=int(bounds_of_rows[where[1]]),
        )
        for entry, *where in _prefills(metadata, (first, last, start, stop), block_size, windowed, cached)
    ]
    if num_decodes:
        where = (0, num_decodes, 0, num_decode_tokens) if metadata.decodes_first else (last, num_reqs, stop, num_tokens)
        found.append(_decodes(metadata, rows, *where, metadata.max_decode_seq_len))
    return tuple(found)


def _prefills(
    metadata: AttentionMetadata, prefills: tuple[int, int, int, int], block_size: int, windowed: bool, cached: bool
) -> list[tuple[Entry, int, int, int, int]]:
    """Of ``prefills`` (rows first:last, tokens start:stop) the runs that one call attends each."""
    first, last, start, stop = prefills
    context_lens = metadata.host.context_lens[first:last]
    if not metadata.from_groups and cached:
        return [("paged", *prefills)]
    if not context_lens.any():
        return [("packed", *prefills)]
    if not metadata.from_groups:
        return [("paged", *prefills)]
    if windowed:
        _refuse_unwritten(metadata, start, stop)
    return _runs(metadata, context_lens, first, block_size)


def _decodes(
    metadata: AttentionMetadata, rows: _Rows, first: int, last: int, start: int, stop: int, max_seq_len: int
) -> Segment:
    """Decodes, by the call for rows of one length where they have one."""
    num_rows, num_tokens = last - first, stop - start
    query_len = metadata.max_query_len if not metadata.num_prefills else metadata.max_decode_query_len
    of_any_lengths = query_len == num_tokens > 1  # a captured size of tokens, whose rows may be prompts
    if metadata.use_cuda_graph and not metadata.from_groups and num_rows and not of_any_lengths:
        query_len = max(1, num_tokens // num_rows)  # its rows are of one length, whatever this step's are
    bounds = {"max_query_len": query_len, "max_seq_len": max_seq_len}
    if query_len and num_tokens == num_rows * query_len:
        return rows.segment("decode", first, last, start, stop, query_len=query_len, **bounds)
    return rows.segment("paged", first, last, start, stop, **bounds)


def _runs(
    metadata: AttentionMetadata, context_lens: npt.NDArray[np.int32], first: int, block_size: int
) -> list[tuple[Entry, int, int, int, int]]:
    """Runs of prompts whose keys are all in the cache, and of those that have no table."""
    host = metadata.host
    bounds = host.query_start_loc[first : first + len(context_lens) + 1]
    cached = context_lens > 0
    if host.block_table.shape[1]:
        slots = host.slot_mapping[bounds[:-1]]
        # Block 0 says nothing: rows that are empty are padded with it. Such a prompt's keys are all new in any case.
        cached |= (slots >= block_size) & (host.block_table[first : first + len(cached), 0] == slots // block_size)
    edges = [0, *(np.flatnonzero(np.diff(cached)) + 1).tolist(), len(cached)]
    return [
        ("paged" if cached[low] else "packed", first + low, first + high, int(bounds[low]), int(bounds[high]))
        for low, high in pairwise(edges)
    ]


def _refuse_unwritten(metadata: AttentionMetadata, start: int, stop: int) -> None:
    """ValueError for a windowed chunk of the list builder whose early tokens, which its own queries need, are left out
    of the cache.
    """
    if (metadata.host.slot_mapping[start:stop] < 0).any():
        raise ValueError(
            "metadata: a windowed prompt with context has tokens without a slot, which its own queries attend to; "
            "flash reads keys of such a chunk from the cache, so let the builder have no sliding_window, or chunks "
            "no longer than it"
        )


def cross_segments(metadata: AttentionMetadata, *, cached: bool) -> tuple[Segment, ...]:
    """The segments of a step in a cross layer. In steps of the list builder prompts attend over this step's encoder
    keys, for their rows of the table are empty; elsewhere, with a cache (``cached``), all keys are there.
    """
    table = metadata.cross_block_table
    if not table.shape[1]:  # the list builder's, of decodes without encoder tokens; libraries take no such table
        table = table.new_zeros((table.shape[0], 1))
    rows = _Rows(
        table, metadata.encoder_seq_lens, metadata.query_start_loc,
        metadata.encoder_seq_start_loc, metadata.encoder_query_start_loc,
    )  # fmt: skip
    num_reqs, num_tokens, longest = metadata.num_reqs, metadata.num_tokens, metadata.max_encoder_seq_len
    num_keys = int(metadata.host.encoder_query_start_loc[-1])
    longest_query = metadata.max_query_len
    if not cached:
        return (
            rows.segment(
                "packed", 0, num_reqs, 0, num_tokens, max_query_len=longest_query, max_seq_len=longest,
                num_keys=num_keys,
            ),
        )  # fmt: skip
    longest = longest or 1  # rows without keys may be lent one
    if not metadata.num_prefills:
        return (_decodes(metadata, rows, 0, num_reqs, 0, num_tokens, longest),)
    if not metadata.from_groups:
        return (rows.segment("paged", 0, num_reqs, 0, num_tokens, max_query_len=longest_query, max_seq_len=longest),)
    prompts, stop = metadata.num_prefills, metadata.num_prefill_tokens
    bounds = {"max_query_len": longest_query, "max_seq_len": longest}
    found = [rows.segment("packed", 0, prompts, 0, stop, **bounds, num_keys=num_keys)]
    if prompts < num_reqs:
        found.append(_decodes(metadata, rows, prompts, num_reqs, stop, num_tokens, longest))
    return tuple(found)


def packed_segment(starts: Tensor, num_tokens: int, longest: int, num_keys: int) -> Segment:
    """Rows whose tokens attend among themselves, all new: ``starts`` int32 (rows + 1,) says where each begins, and the
    last one ends at ``num_keys``.
    """
    return Segment(
        "packed", 0, len(starts) - 1, 0, num_tokens, 0, longest, longest,
        block_table=starts, lengths=starts, query_starts=starts, key_sums=starts, key_starts=starts,  # starts are read
        num_keys=num_keys,
    )  # fmt: skip
