"""The placeholders of a step of the list builder: maps by modality, of groups that say which tokens take embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from attncore.arguments import own_items
from attncore.array_arguments import Int32Array
from attncore.builder.blocks.placeholder_map import Placeholder, PlaceholderMap, checked_ranges, map_of_ranges
from attncore.builder.lists import error_texts
from attncore.quoted import quoted, type_name

Ranges = dict[str, list[Placeholder]]


def placeholder_maps(groups: Any, context_lens: Int32Array, query_lens: Int32Array) -> dict[str, PlaceholderMap]:
    """Modality -> the tokens of the step that take its embeddings, for each modality of ``groups``, in their order.

    Lengths are int32[n], of the rows of the step; each sequence of a group is a row. Raises ValueError or TypeError
    that names the group and the placeholder.
    """
    by_row: list[Ranges] = []
    owners: list[int] = []
    for index, group in enumerate(groups):
        items = own_items(group)
        ranges = _checked(f"groups[{index}].placeholders", items[5] if len(items) > 5 else None)
        count = len(own_items(items[1]))
        by_row += [ranges] * count
        owners += [index] * count
    if len(by_row) != len(query_lens):
        raise error_texts.changed_groups()
    modalities = dict.fromkeys(modality for ranges in by_row for modality in ranges)
    return {
        modality: map_of_ranges([ranges.get(modality, []) for ranges in by_row], owners, context_lens, query_lens)
        for modality in modalities
    }


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
            raise ValueError(f"{path}: {modality} and {other} both take token {later}; a token takes one embedding")
    return found
