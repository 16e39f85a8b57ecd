"""The placeholders of a step of the list builder: maps by modality, of groups that say which tokens take embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from attncore import array_arguments
from attncore.arguments import own_items
from attncore.array_arguments import Int32Array
from attncore.builder.blocks.placeholder_map import (
    Placeholder,
    PlaceholderMap,
    checked_ranges,
    num_tokens,
    runs_of_ranges,
    to_map,
)
from attncore.builder.lists import error_texts
from attncore.quoted import MOST, one_line, quoted, type_name

Ranges = dict[str, list[Placeholder]]
"""A group's placeholders by modality."""


def placeholder_maps(
    groups: Any, context_lens: Int32Array, query_lens: Int32Array, most: int | None
) -> dict[str, PlaceholderMap]:
    """Modality -> the tokens of the step that take its embeddings, for each modality of ``groups``, in their order.

    Lengths are int32[n], of the rows of the step; each sequence of a group is a row. ``most`` numbers may stand in the
    answer to a line of ``attncore build``, None: it is none. Raises ValueError or TypeError that names the group and
    the placeholder.
    """
    modalities: dict[str, None] = {}
    by_row: list[list[tuple[str, Placeholder]]] = []
    owners: list[int] = []
    for index, group in enumerate(groups):
        items = own_items(group)
        path = f"groups[{index}].placeholders"
        ranges = _checked(path, items[5] if len(items) > 5 else None)
        modalities |= dict.fromkeys(ranges)
        in_order = _in_order(path, ranges)
        count = len(own_items(items[1]))
        by_row += [in_order] * count
        owners += [index] * count
    if len(by_row) != len(query_lens):
        raise error_texts.changed_groups()
    found = runs_of_ranges(modalities, by_row, owners, context_lens, query_lens)
    count = num_tokens(found)
    array_arguments.at_most("placeholders", count, array_arguments.MOST_TOKENS, "tokens of them in the step")
    if most is not None and 2 * count > most:
        raise error_texts.too_many_placeholders(count, most)
    return {modality: to_map(runs) for modality, runs in found.items()}


def _checked(path: str, placeholders: Any) -> Ranges:
    """A group's placeholders, each modality's in the order of offsets."""
    if placeholders is None:
        return {}
    if not isinstance(placeholders, Mapping):
        raise TypeError(f"{path}: {type_name(placeholders)} found; give a list of Placeholder for each modality")
    found: Ranges = {}
    for modality, ranges in dict(placeholders).items():
        if not isinstance(modality, str) or not modality:
            raise TypeError(f"{path}: {quoted(modality)} is no name of a modality, such as 'image'")
        found[modality] = checked_ranges(f"{path}[{quoted(modality)}]", ranges)
    return found


def _in_order(path: str, found: Ranges) -> list[tuple[str, Placeholder]]:
    """The placeholders of all modalities in the order of offsets; each token takes one embedding at most."""
    placed = sorted(
        ((modality, one) for modality, ranges in found.items() for one in ranges), key=lambda pair: pair[1].offset
    )
    for (modality, before), (other, after) in pairwise(placed):
        if after.offset < before.offset + before.length:
            both = " and ".join(one_line(name, MOST) for name in (modality, other))
            raise ValueError(f"{path}: {both} both take token {after.offset}; a token takes one embedding")
    return placed
