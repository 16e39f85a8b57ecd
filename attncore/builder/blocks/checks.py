"""Checks of what the building blocks are given: errors begin with the argument's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore import slots

if TYPE_CHECKING:
    from attncore.builder.metadata import CommonAttentionMetadata

INT32 = np.dtype(np.int32)


def lengths(name: str, values: npt.ArrayLike, least: int) -> slots.Int32Array:
    """``values`` as int32[n], each ``least`` or more; an int32 array is looked at once and not copied."""
    if (
        isinstance(values, np.ndarray)
        and values.dtype is INT32
        and values.ndim == 1
        and (not values.size or np.minimum.reduce(values) >= least)
    ):
        return values
    return slots._lengths(name, values, least)


def table(values: npt.ArrayLike, num_rows: int | None = None) -> slots.Int32Array:
    """``block_table`` as int32[n, width]: integers that fit, one row a request where ``num_rows`` says how many."""
    array = slots._block_table(values)
    if num_rows is not None and len(array) != num_rows:
        raise ValueError(f"block_table: {len(array)} rows for {num_rows} requests; give each its row")
    return array


def ids_fit(name: str, ids: npt.NDArray[Any]) -> None:
    """Raises where a block id is negative or no int32."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > slots.INT32_MAX:
        raise ValueError(f"{name}: block id {low if low < 0 else high} is outside 0..{slots.INT32_MAX}")


def same_length(name: str, values: npt.NDArray[Any], num_reqs: int) -> None:
    """Raises where a list of lengths is not one a request."""
    if len(values) != num_reqs:
        raise ValueError(f"{name}: {len(values)} lengths for {num_reqs} requests; give one each")


def contexts(query_lens: slots.Int32Array, seq_lens: slots.Int32Array) -> slots.Int32Array:
    """Context lengths; raises where a request is shorter than its tokens of this step."""
    same_length("seq_lens", seq_lens, len(query_lens))
    context = seq_lens - query_lens
    if len(context) and context.min() < 0:
        row = int(np.argmax(context < 0))
        raise ValueError(
            f"seq_lens: row {row} has {seq_lens[row]} tokens, fewer than its {query_lens[row]} of this step"
        )
    return context


def whole_requests(metadata: CommonAttentionMetadata, why: str) -> None:
    """Raises unless each request's keys are its tokens up to its last, all of them: ``why`` that is needed.

    So not a step padded for a graph, of a cross group, of one rank, or with lengths that a window has capped.
    """
    host = metadata.host
    if metadata.use_cuda_graph or len(host.seq_lens) != len(host.query_lens):
        raise ValueError(f"metadata: padded for a graph; take its batch without padding ({why})")
    if not hasattr(host, "slot_mapping"):
        raise ValueError(f"metadata: of a cross group, whose keys are an encoder's; take a decoder group's ({why})")
    row = first_partial(metadata)
    if row >= 0:
        raise ValueError(
            f"metadata: row {row} has a length capped by a sliding window, or that of one rank of several; {why}"
        )


def first_partial(metadata: CommonAttentionMetadata) -> int:
    """The first row whose ``seq_lens`` does not say how far its last token has come; -1: none."""
    host = metadata.host
    running = np.flatnonzero(host.query_lens)
    reached = host.positions[host.logits_indices[running]] + 1
    partial = running[reached != host.seq_lens[running]]
    return int(partial[0]) if len(partial) else -1
