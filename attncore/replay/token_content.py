"""Queries, keys and values as a function of what a token is, where it stands and the layer.

A real model's keys of a shared prefix are equal for all who share it. Here they are by construction: a row is the sum
of two table rows, which a hash of (content id, position, layer) picks. So any part of any request can be computed
again for a check, without the cache and without a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attncore.replay.traces.trace import HASH_BLOCK, Request

if TYPE_CHECKING:
    from attncore.builder.persistent.step_metadata import StepMetadata
    from attncore.replay.scheduling.step import Step

_ROWS = 1024  # a table; two tables make a million different tokens a layer
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)  # spread ids, positions and layers over 64 bits

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Content:
    """Rows for one shape of model: float32, every number normal with mean 0 and variance 1, all from ``seed``."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, seed: int) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = head_size**-0.5
        width = (num_heads + 2 * num_kv_heads) * head_size
        tables = np.random.default_rng(seed).standard_normal((2, _ROWS, width), dtype=np.float32)
        self._first, self._second = tables * np.float32(0.5**0.5)

    def tokens(self, content_ids: Int64, positions: Int64, layer: int) -> tuple[Float32, Float32, Float32]:
        """Query ``(tokens, num_heads, head_size)``, key and value ``(tokens, num_kv_heads, head_size)`` of one layer.

        ``content_ids`` and ``positions`` are int64, one a token. The three are parts of one array, as the output of a
        fused projection is: their rows are not adjacent.
        """
        picks = _mix(content_ids, positions, layer)
        rows = self._first[picks & np.uint64(_ROWS - 1)]
        rows += self._second[picks >> np.uint64(32) & np.uint64(_ROWS - 1)]
        heads = rows.reshape(len(rows), -1, self.head_size)
        last = self.num_heads + self.num_kv_heads
        return heads[:, : self.num_heads], heads[:, self.num_heads : last], heads[:, last:]


def token_ids(content_ids: Int64, positions: Int64, vocab_size: int) -> Int64:
    """A token of a model's vocabulary for each content id at its position, int64."""
    return (_mix(content_ids, positions, 0) % np.uint64(vocab_size)).astype(np.int64)


def _mix(content_ids: Int64, positions: Int64, layer: int) -> npt.NDArray[np.uint64]:
    """64 well-mixed bits a token (the finaliser of SplitMix64)."""
    bits = content_ids.astype(np.uint64) * np.uint64(_ODD[0])
    bits += positions.astype(np.uint64) * np.uint64(_ODD[1])
    bits += np.uint64(layer * _ODD[2] % 2**64)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def own_content(row: int) -> int:
    """The content id of what only the request in this row of the trace has: the tokens that it generates, and prompts
    of which the trace does not say what they share."""
    return 2 * row + 1


def rejected_content(row: int) -> int:
    """The content id of drafts of this row's request that are rejected: of no token that stays."""
    return -own_content(row)


def content_ids(request: Request, start: int, stop: int) -> Int64:
    """The content id of each of the tokens ``start .. stop - 1`` of a request, int64.

    A hash id of the trace is the content of its ``HASH_BLOCK`` prompt tokens, for every request that has it.
    """
    ids = np.full(stop - start, own_content(request.row), dtype=np.int64)
    shared = min(stop, request.prompt_tokens) - start
    if request.hash_ids is not None and shared > 0:
        hash_ids = np.array(request.hash_ids, dtype=np.int64)
        ids[:shared] = 2 * hash_ids[np.arange(start, start + shared) // HASH_BLOCK]
    return ids


def step_content(step: Step, metadata: StepMetadata) -> Int64:
    """The content id of each of the step's tokens, int64, in the order of ``metadata``."""
    host = metadata.host
    own = np.array([own_content(row) for row in metadata.req_ids], dtype=np.int64)
    ids: Int64 = own[host.token_to_req_indices]
    for running in step.decodes if step.drafts else ():
        draft = step.draft(running)
        if draft.rejected:
            end = int(host.query_start_loc[metadata.req_ids.index(running.row) + 1])
            ids[end - draft.rejected : end] = rejected_content(running.row)
    shared = [(running, count) for running, count in step.prefills if running.request.hash_ids is not None]
    if shared:
        index_of = {row: index for index, row in enumerate(metadata.req_ids)}
        for running, count in shared:
            start = int(host.query_start_loc[index_of[running.row]])
            ids[start : start + count] = content_ids(running.request, running.computed, running.computed + count)
    return ids
