"""Bounds of the chunks in which kernels of recurrent layers scan the tokens of a step (Mamba-2, gated delta nets)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.array_arguments import Int32Array


class StateChunks(NamedTuple):
    """The chunks of n requests' tokens, request after request, on the host; c is their number."""

    chunk_start_loc: Int32Array
    """int32[c + 1]: where each chunk starts among the tokens; a chunk is of one request."""
    chunk_to_req: Int32Array
    """int32[c]: the row of the chunk's request."""
    chunk_index: Int32Array
    """int32[c]: the number of the chunk among those of its request, from 0."""
    req_start_loc: Int32Array
    """int32[n + 1]: where each request's chunks start among the c chunks. The last one of request i is
    ``req_start_loc[i + 1] - 1``, whose end has its state."""


def state_chunks(query_lens: npt.ArrayLike, chunk_size: int, context_lens: npt.ArrayLike | None = None) -> StateChunks:
    """The chunks of n requests that run ``query_lens`` int[n] tokens: up to ``chunk_size`` tokens of one request each.

    Chunks begin with the request's first token of the step, as kernels count that take ``query_start_loc`` alone. With
    ``context_lens`` int[n] they end at multiples of ``chunk_size`` in the request, so that a prompt has the same chunks
    however it is divided among steps. A request without tokens has no chunk. ValueError or TypeError that names the
    argument.
    """
    chunk_size = arguments.integer("chunk_size", chunk_size, 1)
    lens = array_arguments.lengths("query_lens", query_lens, 0)
    offsets = np.zeros(len(lens), np.int64)
    if context_lens is not None:
        contexts = array_arguments.lengths("context_lens", context_lens, 0)
        if len(contexts) != len(lens):
            raise ValueError(f"context_lens: {len(contexts)} given, but query_lens has {len(lens)}")
        offsets = contexts.astype(np.int64) % chunk_size
    num_tokens = int(lens.sum(dtype=np.int64))
    array_arguments.at_most("query_lens", num_tokens, array_arguments.MOST_TOKENS, "tokens")
    counts = np.where(lens > 0, (offsets + lens + chunk_size - 1) // chunk_size, 0)
    req_starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=req_starts[1:])
    rows = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
    index = np.arange(len(rows), dtype=np.int32) - req_starts.take(rows)
    first_tokens = np.cumsum(lens, dtype=np.int64) - lens
    starts = np.full(len(rows) + 1, num_tokens, np.int32)
    starts[:-1] = first_tokens.take(rows) + np.maximum(index.astype(np.int64) * chunk_size - offsets.take(rows), 0)
    return StateChunks(starts, rows, index, req_starts)
