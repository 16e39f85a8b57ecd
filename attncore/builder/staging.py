"""The arenas a step's metadata is written to: one block of memory each, used in turn.

On a CPU device that is all: arenas rotate and nothing is copied. A ring that brings an arena to a GPU has its place
here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT = 128  # bytes: a cache line of the widest device, and no two fields share one


class Field(NamedTuple):
    """One array of an arena: ``length = per_token * tokens + per_request * requests + extra``."""

    name: str
    dtype: type[np.generic]
    per_token: int = 0
    per_request: int = 0
    extra: int = 0

    def length(self, num_tokens: int, num_reqs: int) -> int:
        return self.per_token * num_tokens + self.per_request * num_reqs + self.extra


# Per-token fields first, so that their offsets do not depend on the number of requests.
FIELDS = (
    Field("slot_mapping", np.int64, per_token=1),
    Field("positions", np.int64, per_token=1),
    Field("token_to_req_indices", np.int32, per_token=1),
    Field("seq_lens", np.int32, per_request=1),
    Field("context_lens", np.int32, per_request=1),
    Field("query_lens", np.int32, per_request=1),
    Field("logits_indices", np.int32, per_request=1),
    Field("last_blocks", np.int32, per_request=1),
    Field("paged_kv_last_page_len", np.int32, per_request=1),
    Field("query_start_loc", np.int32, per_request=1, extra=1),
    Field("seq_start_loc", np.int32, per_request=1, extra=1),
    Field("paged_kv_indptr", np.int32, per_request=1, extra=1),
    Field("prefill_query_start_loc", np.int32, per_request=1, extra=1),
    Field("prefill_seq_start_loc", np.int32, per_request=1, extra=1),
)


class StagingRing:
    """``depth`` arenas for steps of up to ``num_tokens`` tokens and ``num_reqs`` requests; step k uses arena k % depth.

    ``arenas[i]`` maps a field's name to its array (host memory, whole capacity); ``nbytes`` is what all of them take.
    """

    def __init__(self, num_tokens: int, num_reqs: int, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth: {depth} is below 1; a ring needs an arena")
        offsets, end = [], 0
        for field in FIELDS:
            offsets.append(end)
            size = field.length(num_tokens, num_reqs) * np.dtype(field.dtype).itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = depth * end
        self.arenas: list[dict[str, npt.NDArray[Any]]] = []
        for _ in range(depth):
            memory = np.zeros(end + ALIGNMENT, np.uint8)
            memory = memory[-memory.ctypes.data % ALIGNMENT :]
            arena = {}
            for field, offset in zip(FIELDS, offsets, strict=True):
                length = field.length(num_tokens, num_reqs)
                size = length * np.dtype(field.dtype).itemsize
                arena[field.name] = memory[offset : offset + size].view(field.dtype)
            self.arenas.append(arena)
