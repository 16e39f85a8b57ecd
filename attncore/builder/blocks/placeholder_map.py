"""The tokens of a step that take the embeddings of images, audio or video instead of their own.

A prompt has *placeholders*: ranges of tokens that stand for an item. With chunked prefill a step may run only a part of
a range; the map then has only that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.array_arguments import Int32Array, Int64Array
from attncore.show import counted


class Placeholder(NamedTuple):
    """``length`` tokens from token ``offset`` of a request's prompt on take rows of the embeddings of item ``item``.

    The first takes row ``embedding_start``. An item whose tokens are interrupted by ordinary tokens (rows of an image)
    has several placeholders.
    """

    item: int
    offset: int
    length: int
    embedding_start: int = 0


class PlaceholderRun(NamedTuple):
    """Tokens ``token_start:token_stop`` of the step take the embeddings of ``item`` from row ``embedding_start`` on."""

    req_index: int
    item: int
    token_start: int
    token_stop: int
    embedding_start: int


class PlaceholderMap(NamedTuple):
    """m tokens of a step and the embeddings that they take, in the order of tokens; host arrays.

    For each i, ``embeds[token_indices[i]] = items[item_indices[i]][embedding_indices[i]]``.
    """

    token_indices: Int64Array
    """int64[m]: the index among the step's tokens."""
    req_indices: Int32Array
    """int32[m]: the row of the token's request."""
    item_indices: Int32Array
    """int32[m]: the placeholder's ``item``."""
    embedding_indices: Int64Array
    """int64[m]: the row in that item's embeddings."""
    runs: tuple[PlaceholderRun, ...]
    """The same as runs of consecutive tokens, each of which is one slice to copy."""


def placeholder_map(
    placeholders: Sequence[Sequence[Placeholder]], context_lens: npt.ArrayLike, query_lens: npt.ArrayLike
) -> PlaceholderMap:
    """The map of a step: ``placeholders`` of each request's whole prompt, in the order of rows; lengths int[n].

    Ranges that this step does not reach, or that lie in the context, are left out. Raises ValueError or TypeError that
    names request and placeholder where a range is malformed or two ranges of a request overlap.
    """
    queries = array_arguments.lengths("query_lens", query_lens, 0)
    contexts = array_arguments.lengths("context_lens", context_lens, 0)
    array_arguments.same_length("context_lens", contexts, len(queries))
    placeholders = arguments.items("placeholders", placeholders)
    if len(placeholders) != len(queries):
        raise ValueError(
            f"placeholders: those of {counted(len(placeholders), 'request')} for {len(queries)}; give each a list"
        )
    runs: list[PlaceholderRun] = []
    first_token = 0
    for row, (ranges, context, query) in enumerate(zip(placeholders, contexts.tolist(), queries.tolist(), strict=True)):
        for item, offset, length, embedding_start in _sort_ranges(row, ranges):
            start, stop = max(offset, context), min(offset + length, context + query)
            if start < stop:
                token = first_token + start - context
                runs.append(PlaceholderRun(row, item, token, token + stop - start, embedding_start + start - offset))
        first_token += query
    total = sum(run.token_stop - run.token_start for run in runs)
    array_arguments.at_most("placeholders", total, array_arguments.MOST_TOKENS, "tokens of them in the step")
    return _to_arrays(runs)


def _to_arrays(runs: list[PlaceholderRun]) -> PlaceholderMap:
    columns = np.array(runs, np.int64).reshape(-1, 5).T
    rows, items, starts, stops, embedding_starts = columns
    lengths = stops - starts
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return PlaceholderMap(
        np.repeat(starts, lengths) + within,
        np.repeat(rows, lengths).astype(np.int32),
        np.repeat(items, lengths).astype(np.int32),
        np.repeat(embedding_starts, lengths) + within,
        tuple(runs),
    )


def _sort_ranges(row: int, ranges: Sequence[Placeholder]) -> list[Placeholder]:
    """A request's placeholders, checked and sorted by offset."""
    if not isinstance(ranges, (list, tuple)) or isinstance(ranges, Placeholder):
        raise TypeError(f"placeholders[{row}]: {ranges!r} is not a list of Placeholder")
    checked: list[Placeholder] = []
    for index, placeholder in enumerate(ranges):
        path = f"placeholders[{row}][{index}]"
        if not isinstance(placeholder, tuple) or len(placeholder) != 4:
            raise TypeError(f"{path}: {placeholder!r} is not a Placeholder")
        checked.append(
            Placeholder(
                *(
                    arguments.integer(f"{path}.{name}", value, least)
                    for name, value, least in zip(Placeholder._fields, placeholder, (0, 0, 1, 0), strict=True)
                )
            )
        )
    in_order = sorted(checked, key=lambda placeholder: placeholder.offset)
    for before, after in pairwise(in_order):
        if after.offset < before.offset + before.length:
            raise ValueError(
                f"placeholders[{row}]: items {before.item} and {after.item} both take token {after.offset}; "
                "ranges of a request may not overlap"
            )
    return in_order
