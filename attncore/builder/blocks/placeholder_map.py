"""The tokens of a step that take the embeddings of images, audio or video instead of their own.

A prompt has *placeholders*: ranges of tokens that stand for an item. With chunked prefill a step may run only a part of
a range; the map then has only that part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.array_arguments import Int32Array, Int64Array
from attncore.quoted import quoted
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
    checked = [checked_ranges(f"placeholders[{row}]", ranges) for row, ranges in enumerate(placeholders)]
    ranges = [[("", one) for one in of_row] for of_row in checked]
    runs = runs_of_ranges([""], ranges, range(len(ranges)), contexts, queries)
    array_arguments.at_most("placeholders", num_tokens(runs), array_arguments.MOST_TOKENS, "tokens of them in the step")
    return to_map(runs[""])


class Runs(NamedTuple):
    """The runs of one modality, and where the embeddings of each one's item begin among those of all items."""

    runs: list[PlaceholderRun]
    first_rows: list[int]


def runs_of_ranges(
    modalities: Iterable[str],
    ranges: Sequence[Sequence[tuple[str, Placeholder]]],
    owners: Sequence[int],
    contexts: Int32Array,
    queries: Int32Array,
) -> dict[str, Runs]:
    """Modality -> the runs of a step, of checked lengths. Looks at no range twice that a row does not run.

    ``ranges`` are those of each row with their modalities, in the order of offsets and without overlap. ``owners`` has
    a number for each row: rows of one owner have the same ranges, and share their items.
    """
    found = {modality: Runs([], []) for modality in modalities}
    ends: dict[int, list[int]] = {}
    sizes: dict[int, dict[tuple[str, int], int]] = {}
    starts: dict[tuple[int, str, int], int] = {}
    rows_so_far = dict.fromkeys(found, 0)
    first_token = 0
    lengths = zip(ranges, owners, contexts.tolist(), queries.tolist(), strict=True)
    for row, (of_row, owner, context, query) in enumerate(lengths):
        if owner not in ends:
            ends[owner], sizes[owner] = [one.offset + one.length for _, one in of_row], _rows_of_items(of_row)
        for index in range(bisect_right(ends[owner], context), len(of_row)):
            modality, (item, offset, _, embedding_start) = of_row[index]
            start, stop = max(offset, context), min(ends[owner][index], context + query)
            if start >= stop:
                break
            key = owner, modality, item
            if key not in starts:
                starts[key] = rows_so_far[modality]
                rows_so_far[modality] += sizes[owner][modality, item]
            token = first_token + start - context
            found[modality].runs.append(
                PlaceholderRun(row, item, token, token + stop - start, embedding_start + start - offset)
            )
            found[modality].first_rows.append(starts[key])
        first_token += query
    return found


def num_tokens(found: Mapping[str, Runs]) -> int:
    """Tokens of the step that are in the runs."""
    return sum(run.token_stop - run.token_start for one in found.values() for run in one.runs)


def _rows_of_items(ranges: Sequence[tuple[str, Placeholder]]) -> dict[tuple[str, int], int]:
    """How many rows of embeddings each item of each modality has, as far as its tokens take them."""
    sizes: dict[tuple[str, int], int] = {}
    for modality, (item, _, length, embedding_start) in ranges:
        sizes[modality, item] = max(sizes.get((modality, item), 0), embedding_start + length)
    return sizes


def to_map(found: Runs) -> PlaceholderMap:
    """The map of the runs of one modality."""
    runs, first_rows = found
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
        embeddings + np.repeat(np.array(first_rows, np.int64), lengths),
    )


def checked_ranges(where: str, ranges: Sequence[Placeholder]) -> list[Placeholder]:
    """A request's placeholders, checked and sorted by offset. Errors begin with ``where``."""
    if not isinstance(ranges, (list, tuple)) or isinstance(ranges, Placeholder):
        raise TypeError(f"{where}: {quoted(ranges)} is not a list of Placeholder")
    checked: list[Placeholder] = []
    for index, placeholder in enumerate(ranges):
        path = f"{where}[{index}]"
        if not isinstance(placeholder, tuple) or len(placeholder) != 4:
            raise TypeError(f"{path}: {quoted(placeholder)} is not a Placeholder")
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
