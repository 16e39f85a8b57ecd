"""What adopted steps of one number of rows share."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.builder.adopted.step import OF_STARTS
from attncore.builder.device.memory import zeros

_OF_LENGTHS = ("seq_lens", "context_lens", "seq_start_loc", "paged_kv_indptr", "paged_kv_last_page_len")
_ONE_LONGER = ("query_start_loc", "seq_start_loc", "paged_kv_indptr", "_starts")


class Size:
    """What steps of one number of rows have in common: views of our memory, and of the engine's of last time."""

    __slots__ = ("device", "facts", "given", "host", "kept", "key", "num_reqs", "values")

    def __init__(self, num_reqs: int, device: dict[str, Any], arrays: list[dict[str, Any]]) -> None:
        self.num_reqs, self.device = num_reqs, device
        self.host = [
            {name: of_step[name][: num_reqs + (name in _ONE_LONGER)] for name in (*OF_STARTS, *_OF_LENGTHS)}
            for of_step in arrays
        ]
        self.kept: Any = None
        """Aliases of the engine's tensors, which keep their memory: a tensor that lies there later shares it."""
        self.given: Any = None
        """The tensors of metadata: ``kept``, but lengths of ours where padded rows are lent keys."""
        self.values: dict[str, Any] = {}
        """What metadata of ``given`` has beside a step's own."""
        self.key: Any = None
        """Where the engine's tensors lay, and what else tells ``given``."""
        self.facts: Any = None
        """``facts_of_tensors`` of the engine's; None where ``key`` is none, or a tensor has no address."""


def new_arrays(max_num_reqs: int) -> dict[str, Any]:
    """Host memory of one step, which ``AdoptedRows`` fills."""
    names = (*OF_STARTS, *_OF_LENGTHS, "_starts", "_lengths")
    return {name: zeros(max_num_reqs + (name in _ONE_LONGER), np.int32) for name in names}
