"""Checks that a step holds whole requests, which chunks, ranks and cuts of requests need."""

from __future__ import annotations

import numpy as np

from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.slices import is_cross


def check_whole_requests(metadata: CommonAttentionMetadata, why: str) -> None:
    """ValueError unless each request's keys are all its tokens up to its last; ``why`` says what needs them.

    It refuses a step padded for a graph, with draft trees or spans, of a cross group, of one rank, with lengths that a
    window has capped, or whose lengths, slots or table the device alone knows.
    """
    check_exact_lengths(metadata, why)
    host = metadata.host
    if metadata.use_cuda_graph or len(host.seq_lens) != len(host.query_lens):
        raise ValueError(f"metadata: padded for a graph; take its batch without padding ({why})")
    if is_cross(host):
        raise ValueError(f"metadata: of a cross group, whose keys are an encoder's; take a decoder group's ({why})")
    for name in ("slot_mapping", "block_table"):
        if not hasattr(host, name):
            raise ValueError(
                f"metadata: no {name} on the host, as of an adopted step on a device; take a step that has it ({why})"
            )
    if holds_trees(metadata):
        raise ValueError(f"metadata: it holds draft trees, whose tokens see some of those before them; {why}")
    if getattr(host, "span_ends", None) is not None:
        raise ValueError(f"metadata: it holds spans, whose tokens see some of those behind them; {why}")
    if metadata.of_rank:  # whether or not this rank keeps all tokens so far
        raise ValueError(f"metadata: it is that of one rank of several already; {why}")
    row = first_partial(metadata)
    if row >= 0:
        raise ValueError(
            f"metadata: row {row} has a length capped by a sliding window, or that of one rank of several; {why}"
        )


def check_exact_lengths(metadata: CommonAttentionMetadata, why: str) -> None:
    """ValueError unless the host knows the lengths of a step, or of the one that a view was taken of; ``why`` says what
    needs them.
    """
    if (lengths := metadata.host_lengths) != "exact":
        raise ValueError(f"metadata: the host's lengths of this step are {lengths}, not exact; {why}")


def holds_trees(metadata: CommonAttentionMetadata) -> bool:
    """Whether a request of the step runs a draft tree."""
    masks = getattr(metadata.host, "tree_mask", None)
    return masks is not None and bool(masks.any())


def first_partial(metadata: CommonAttentionMetadata) -> int:
    """The first row whose ``seq_lens`` differs from the position of its last token + 1, which is its context and its
    tokens where a step came without positions; -1: none.
    """
    host = metadata.host
    running = np.flatnonzero(host.query_lens)
    if hasattr(host, "positions") and hasattr(host, "logits_indices"):
        reached = host.positions.take(host.logits_indices[running]) + 1
    else:
        reached = (host.context_lens + host.query_lens)[running]
    partial = running[reached != host.seq_lens[running]]
    return int(partial[0]) if len(partial) else -1
