"""The tokens of a step that take the embeddings of images, audio or video instead of their own.

A prompt has *placeholders*: ranges of tokens that stand for an item. With chunked prefill a step may run only a part of
a range; the map then has only that part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
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
    source_indices: Int64Array
    """int64[m]: the row in the embeddings of all items of the map, one whole item after another, in the order of the
    tokens that take them first."""

    def of_tokens(self, start: int, stop: int, first_row: int) -> PlaceholderMap:
        """The part of the tokens ``start:stop``, counted from ``start``, and their requests from ``first_row``.

        ``source_indices`` are those of the whole map. TypeError or ValueError that names the argument where one is no
        integer or negative.
        """
        start = arguments.integer("start", start, 0)
        stop = arguments.integer("stop", stop, 0)
        first_row = arguments.integer("first_row", first_row, 0)
        kept = (self.token_indices >= start) & (self.token_indices < stop)
        runs = (
            run._replace(
                req_index=run.req_index - first_row,
                token_start=max(run.token_start, start) - start,
                token_stop=min(run.token_stop, stop) - start,
                embedding_start=run.embedding_start + max(0, start - run.token_start),
            )
            for run in self.runs
            if run.token_start < stop and start < run.token_stop
        )
        return PlaceholderMap(
            self.token_indices[kept] - start,
            self.req_indices[kept] - np.int32(first_row),
            self.item_indices[kept],
            self.embedding_indices[kept],
            tuple(runs),
            self.source_indices[kept],
        )


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
    requests = [
        RequestPlaceholders({"": checked_ranges(f"placeholders[{row}]", ranges)})
        for row, ranges in enumerate(placeholders)
    ]
    maps = maps_of_requests(requests, contexts, queries)
    return maps[""] if maps else _to_arrays([], [])


class RequestPlaceholders:
    """The placeholders of a request by modality, as ``checked_ranges`` gives them; no two take one token."""

    def __init__(self, by_modality: Mapping[str, Sequence[Placeholder]]) -> None:
        self.modalities = tuple(by_modality)
        placed = [(one, modality) for modality, ranges in by_modality.items() for one in ranges]
        self._placed = sorted(placed, key=lambda each: each[0].offset)
        self._stops = [one.offset + one.length for one, _ in self._placed]
        self.num_rows: dict[tuple[str, int], int] = {}
        """(modality, item) -> how many rows of embeddings the item has, as far as its tokens take them."""
        for one, modality in self._placed:
            rows = max(self.num_rows.get((modality, one.item), 0), one.embedding_start + one.length)
            self.num_rows[modality, one.item] = rows

    def between(self, start: int, stop: int) -> Iterator[tuple[Placeholder, str]]:
        """Those that take tokens of ``start:stop``, and their modalities, in the order of tokens."""
        for index in range(bisect_right(self._stops, start), len(self._stops)):
            if self._placed[index][0].offset >= stop:
                return
            yield self._placed[index]


def maps_of_requests(
    requests: Sequence[RequestPlaceholders],
    contexts: Int32Array,
    queries: Int32Array,
    max_numbers: int | None = None,
) -> dict[str, PlaceholderMap]:
    """Modality -> its map, for each modality of ``requests``, of which there is one for each row; checked lengths.

    Rows with one and the same object share their items. What it takes is in proportion to the ranges that are given,
    the rows and the tokens: a range that no row reaches is looked at once. ValueError where the maps have more than
    ``max_numbers`` numbers, two for each token, before memory is taken for them.
    """
    modalities = dict.fromkeys(name for one in dict.fromkeys(requests) for name in one.modalities)
    runs: dict[str, list[PlaceholderRun]] = {name: [] for name in modalities}
    first_rows: dict[str, list[int]] = {name: [] for name in modalities}  # of the item of each run, in the embeddings
    sizes = dict.fromkeys(modalities, 0)
    items: dict[tuple[RequestPlaceholders, str, int], int] = {}
    first_token = total = 0
    lengths = zip(requests, contexts.tolist(), queries.tolist(), strict=True)
    for row, (request, context, query) in enumerate(lengths):
        for (item, offset, length, embedding_start), name in request.between(context, context + query):
            start, stop = max(offset, context), min(offset + length, context + query)
            token = first_token + start - context
            runs[name].append(PlaceholderRun(row, item, token, token + stop - start, embedding_start + start - offset))
            if (request, name, item) not in items:
                items[request, name, item] = sizes[name]
                sizes[name] += request.num_rows[name, item]
            first_rows[name].append(items[request, name, item])
            total += stop - start
            if max_numbers is not None and 2 * total > max_numbers:
                raise ValueError(
                    f"placeholders: maps of {counted(total, 'token')} or more are beyond the "
                    f"{counted(max_numbers, 'number')} allowed here (`attncore build` has --max-answer)"
                )
        first_token += query
    array_arguments.at_most("placeholders", total, array_arguments.MOST_TOKENS, "tokens of them in the step")
    return {name: _to_arrays(runs[name], first_rows[name]) for name in modalities}


def _to_arrays(runs: list[PlaceholderRun], items: list[int]) -> PlaceholderMap:
    """The map of ``runs``; the embeddings of the item of each begin at row ``items`` of all."""
    columns = np.array(runs, np.int64).reshape(-1, 5).T
    rows, numbers, starts, stops, embedding_starts = columns
    lengths = stops - starts
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    embeddings = np.repeat(embedding_starts, lengths) + within
    return PlaceholderMap(
        np.repeat(starts, lengths) + within,
        np.repeat(rows, lengths).astype(np.int32),
        np.repeat(numbers, lengths).astype(np.int32),
        embeddings,
        tuple(runs),
        embeddings + np.repeat(np.array(items, np.int64), lengths),
    )


def checked_ranges(where: str, ranges: Sequence[Placeholder]) -> list[Placeholder]:
    """A request's placeholders, checked and sorted by offset. Errors begin with ``where``."""
    if not isinstance(ranges, (list, tuple)) or isinstance(ranges, Placeholder):
        raise TypeError(f"{where}: {ranges!r} is not a list of Placeholder")
    checked: list[Placeholder] = []
    for index, placeholder in enumerate(ranges):
        path = f"{where}[{index}]"
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
                f"{where}: items {before.item} and {after.item} both take token {after.offset}; "
                "ranges of a request may not overlap"
            )
    return in_order
