"""The placeholders of a step of the list builder: maps by modality, of groups that say which tokens take embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from attncore.arguments import own_items
from attncore.array_arguments import Int32Array
from attncore.builder.blocks.placeholder_map import (
    Placeholder,
    PlaceholderMap,
    RequestPlaceholders,
    checked_ranges,
    maps_of_requests,
)
from attncore.builder.lists import error_texts
from attncore.quoted import MOST, one_line, quoted, type_name

Ranges = dict[str, list[Placeholder]]


def placeholder_maps(
    groups: Any, context_lens: Int32Array, query_lens: Int32Array, max_numbers: int | None = None
) -> dict[str, PlaceholderMap]:
    """Modality -> the tokens of the step that take its embeddings, for each modality of ``groups``, in their order.

    Lengths are int32[n], of the rows of the step; each sequence of a group is a row. Raises ValueError or TypeError
    that names the group and the placeholder, and ValueError where the maps have more than ``max_numbers`` numbers.
    """
    by_row: list[RequestPlaceholders] = []
    for index, group in enumerate(groups):
        items = own_items(group)
        ranges = _checked(f"groups[{index}].placeholders", items[5] if len(items) > 5 else None)
        by_row += [RequestPlaceholders(ranges)] * len(own_items(items[1]))
    if len(by_row) != len(query_lens):
        raise error_texts.changed_groups()
    return maps_of_requests(by_row, context_lens, query_lens, max_numbers)


def _checked(path: str, placeholders: Any) -> Ranges:
    """A group's placeholders by modality; each token takes one embedding at most."""
    if placeholders is None:
        return {}
    if not isinstance(placeholders, Mapping):
        raise TypeError(f"{path}: {type_name(placeholders)} found; give a list of Placeholder for each modality")
    found: Ranges = {}
    for modality, ranges in dict(placeholders).items():
        if not isinstance(modality, str) or not modality:
            raise TypeError(f"{path}: {quoted(modality)} is no name of a modality, such as 'image'")
        found[modality] = checked_ranges(f"{path}[{quoted(modality)}]", ranges)
    placed = sorted((one.offset, one.length, modality) for modality, ranges in found.items() for one in ranges)
    for (offset, length, modality), (later, _, other) in pairwise(placed):
        if later < offset + length:
            both = " and ".join(one_line(name, MOST) for name in (modality, other))
            raise ValueError(f"{path}: {both} both take token {later}; a token takes one embedding")
    return found
