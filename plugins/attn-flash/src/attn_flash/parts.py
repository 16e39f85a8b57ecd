"""A step cut into the calls that attend it, from host arrays and integers alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Entry = Literal["decode", "paged", "packed"]


class Part(NamedTuple):
    """Rows ``first:last`` of a step, tokens ``start:stop``, for one call of a library."""

    entry: Entry
    """``decode``: rows of ``query_len`` tokens each over the cache; ``paged``: of any lengths; ``packed``: over this
    step's keys alone.
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


def decoder_parts(metadata: Any, *, block_size: int, together: bool, windowed: bool) -> tuple[Part, ...]:
    """The calls of a causal layer. Together they hold every row once; a part of whole tokens comes first.

    ``together``: the library attends decodes and prefills in one paged call as well as in two. ``windowed``: the layer
    has a window. ValueError beginning with ``metadata`` for a step whose keys are neither all in the cache nor all new.
    """
    rows, tokens, prefills = metadata.num_reqs, metadata.num_tokens, metadata.num_prefills
    if not prefills:
        return (_decodes(metadata, 0, rows, 0, tokens),)
    ahead = metadata.decodes_first
    decodes, decode_tokens = rows - prefills, tokens - metadata.num_prefill_tokens
    first, start = (decodes, decode_tokens) if ahead else (0, 0)
    last, stop = first + prefills, start + metadata.num_prefill_tokens
    context_lens = metadata.host.context_lens[first:last]
    some, every = bool(context_lens.any()), bool(decodes)
    if together and every and not metadata.from_groups:
        return (_part(metadata, "paged", 0, rows, 0, tokens, metadata.max_seq_len),)
    longest = metadata.max_prefill_seq_len
    if not some:
        found: list[Part] = [_part(metadata, "packed", first, last, start, stop, longest)]
    elif metadata.from_groups:
        if windowed:
            _refuse_unwritten(metadata, start, stop)
        runs = _runs(metadata, context_lens, first, block_size)
        found = [
            _part(metadata, "paged" if cached else "packed", first, last, start, stop, longest)
            for cached, first, last, start, stop in runs
        ]
    else:
        found = [_part(metadata, "paged", first, last, start, stop, longest)]
    if every:
        where = (0, decodes, 0, decode_tokens) if ahead else (last, rows, stop, tokens)
        found.append(_decodes(metadata, *where))
    return tuple(found)


def _part(metadata: Any, entry: Entry, first: int, last: int, start: int, stop: int, max_seq_len: int) -> Part:
    return Part(entry, first, last, start, stop, 0, metadata.max_query_len, max_seq_len)


def _decodes(metadata: Any, first: int, last: int, start: int, stop: int) -> Part:
    """Decodes, by the call for rows of one length where they have one."""
    rows, tokens = last - first, stop - start
    query_len = metadata.max_query_len if not metadata.num_prefills else metadata.max_decode_query_len
    if metadata.use_cuda_graph and not metadata.from_groups and rows:
        query_len = tokens // rows  # a captured size holds rows of one length, whatever this step's are
    max_seq_len = metadata.max_decode_seq_len if metadata.num_prefills else metadata.max_seq_len
    if query_len and tokens == rows * query_len:
        return Part("decode", first, last, start, stop, query_len, query_len, max_seq_len)
    return Part("paged", first, last, start, stop, 0, query_len, max_seq_len)


def _runs(
    metadata: Any, context_lens: npt.NDArray[np.int32], first: int, block_size: int
) -> list[tuple[bool, int, int, int, int]]:
    """Runs of prompts whose keys are all in the cache, and of those that have no table: (cached, rows, tokens)."""
    host = metadata.host
    bounds = host.query_start_loc[first : first + len(context_lens) + 1]
    cached = context_lens > 0
    if host.block_table.shape[1]:
        slots = host.slot_mapping[bounds[:-1]]
        # Block 0 says nothing: rows that are empty are padded with it. Such a prompt's keys are all new in any case.
        cached |= (slots >= block_size) & (host.block_table[first : first + len(cached), 0] == slots // block_size)
    edges = [0, *(np.flatnonzero(np.diff(cached)) + 1).tolist(), len(cached)]
    return [
        (bool(cached[one]), first + one, first + other, int(bounds[one]), int(bounds[other]))
        for one, other in pairwise(edges)
    ]


def _refuse_unwritten(metadata: Any, start: int, stop: int) -> None:
    """Under a window the list door leaves a chunk's early tokens out of the cache, where its own queries need them."""
    if (metadata.host.slot_mapping[start:stop] < 0).any():
        raise ValueError(
            "metadata: a windowed prompt with context has tokens without a slot, which its own queries attend to; "
            "flash reads keys of such a chunk from the cache, so let the builder have no sliding_window, or chunks "
            "no longer than it"
        )


def cross_parts(metadata: Any, *, cached: bool) -> tuple[Part, ...]:
    """The calls of a cross layer. Behind the list door prompts attend over this step's encoder keys, for their rows of
    the table are empty; elsewhere, with a cache, all keys are there.
    """
    rows, tokens, longest = metadata.num_reqs, metadata.num_tokens, metadata.max_encoder_seq_len
    if not cached:
        return (_part(metadata, "packed", 0, rows, 0, tokens, longest),)
    longest = longest or 1  # rows without keys may be lent one
    if not metadata.num_prefills:
        return (_decodes(metadata, 0, rows, 0, tokens)._replace(max_seq_len=longest),)
    if not metadata.from_groups:
        return (_part(metadata, "paged", 0, rows, 0, tokens, longest),)
    prompts, stop = metadata.num_prefills, metadata.num_prefill_tokens
    found = [_part(metadata, "packed", 0, prompts, 0, stop, longest)]
    if prompts < rows:
        found.append(_decodes(metadata, prompts, rows, stop, tokens)._replace(max_seq_len=longest))
    return tuple(found)
