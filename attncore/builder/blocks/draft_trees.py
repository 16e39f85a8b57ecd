"""Draft trees on the host: parents checked, masks of ancestors and depths made of them, paths checked.

A request runs its last accepted token, the root, and behind it drafts, of which each has a parent: the root (-1), or an
earlier draft. A *token* of the request in this step is the root (0) or draft i (i + 1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.arguments import integer
from attncore.array_arguments import as_array
from attncore.builder.fields import MOST_TREE_TOKENS
from attncore.quoted import quoted
from attncore.show import counted

_INT32 = npt.NDArray[np.int32]
_INT64 = npt.NDArray[np.int64]


def checked_parents(req_id: Hashable, parents: Any) -> _INT32:
    """``parents`` of a request's drafts as int32[drafts].

    ValueError or TypeError that names the request where they are no integers in one row, too many, or where a parent
    is no earlier draft.
    """
    found = _integers(f"trees: parents of request {quoted(req_id)}", parents)
    if len(found) >= MOST_TREE_TOKENS:
        raise ValueError(
            f"trees: {counted(len(found), 'draft')} of request {quoted(req_id)}; a tree has at most "
            f"{MOST_TREE_TOKENS - 1}, for a mask of 64 bits holds them and the root"
        )
    for draft, parent in enumerate(found):
        if not -1 <= parent < draft:
            raise ValueError(
                f"trees: draft {draft} of request {quoted(req_id)} has parent {parent}; give an earlier draft's index, "
                "or -1 for the last accepted token"
            )
    return np.array(found, np.int32)


def masks_and_depths(trees: Sequence[_INT32]) -> tuple[_INT64, _INT64]:
    """The masks and depths of all tokens of ``trees``, tree after tree, int64 each.

    Bit j of a token's mask is set where token j of its tree is the token itself or an ancestor; the root's depth is 0.
    """
    lengths = np.array([len(parents) + 1 for parents in trees], np.int64)
    starts = np.cumsum(lengths) - lengths
    own = np.arange(lengths.sum(), dtype=np.int64) - np.repeat(starts, lengths)
    ancestor = np.repeat(starts, lengths)  # a root is its own
    ancestor[own > 0] += np.concatenate([*trees, np.empty(0, np.int32)]) + 1
    masks = np.left_shift(np.int64(1), own)
    depths = np.minimum(own, 1)
    while (own[ancestor] > 0).any():  # what is known of a token reaches twice as far each time
        masks |= masks[ancestor]
        depths += depths[ancestor]
        ancestor = ancestor[ancestor]
    return masks | 1, depths


def checked_path(req_id: Hashable, path: Any, parents: _INT32) -> list[int]:
    """``path``, the accepted drafts of a request from the root on.

    ValueError or TypeError that names the request where they are no such drafts, or no path of the tree.
    """
    found = _integers(f"paths: of request {quoted(req_id)}", path)
    before = -1
    for draft in found:
        if not 0 <= draft < len(parents):
            raise ValueError(
                f"paths: draft {draft} of request {quoted(req_id)}, whose tree has {counted(len(parents), 'draft')}"
            )
        if parents[draft] != before:
            whose = f"draft {before}" if before >= 0 else "the root"
            raise ValueError(
                f"paths: draft {draft} of request {quoted(req_id)} follows {whose}, but its parent is "
                f"{parents[draft]}; give the drafts of one path, from the root on"
            )
        before = draft
    return found


def _integers(name: str, values: Any) -> list[int]:
    """The integers of one row. Lists are read item by item: an array of a few takes longer to make than to read."""
    if type(values) is list or type(values) is tuple:
        kinds = set(map(type, values))
        if not kinds or kinds == {int}:
            return list(values)
        if not any(isinstance(item, list | tuple) or getattr(item, "ndim", 0) for item in values):
            return [integer(f"{name}: item {index}", item, -(2**63), 2**63 - 1) for index, item in enumerate(values)]
    array = as_array(name, values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: {array.dtype}{list(array.shape)} found; give integers in one row")
    return array.tolist()  # type: ignore[no-any-return]
