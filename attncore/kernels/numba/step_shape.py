"""StepShape: one size of step, eager or captured, with its arenas and the number of rows it is padded to."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.numba.memory import Struct, Words, address_of
from attncore.kernels.numba.step_arena import StepArena
from attncore.show import counted

STEP_SHAPE = Struct("arenas", "max_rows", "pads", "num_reqs", "num_tokens", "query_len", "pad_seq_len", "uniform")
"""The C struct StepShape; ``arenas`` has the addresses of the arenas' structs."""
SHAPE = STEP_SHAPE.type


class StepShape(Words):
    def __init__(
        self, arenas: list[StepArena], metadata: list[Any], pads: bool = False, num_reqs: int = 0, query_len: int = 0,
        pad_seq_len: int = 0, uniform: bool = True, num_tokens: int = 0, sources: list[Any] | None = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        self.arenas, self.metadata = arenas, metadata
        most = num_tokens or num_reqs * query_len
        self.max_rows = min(min(arena.max_reqs, arena.max_tokens) for arena in arenas)
        for arena in arenas:
            if num_reqs > arena.max_reqs:
                raise ValueError(f"num_reqs: {num_reqs} exceed the {arena.max_reqs} that the arenas hold")
            if most > arena.max_tokens:
                what = (
                    f"num_tokens: {num_tokens}"
                    if num_tokens
                    else f"num_reqs: {num_reqs} of {counted(query_len, 'token')}"
                )
                raise ValueError(f"{what} exceed the {arena.max_tokens} that the arenas hold")
        self.sources, self.device = sources or [], device
        self.capacity: Any = None
        self.bucket: Any = None
        self.replay: Any = None
        self.plans: Any = None
        self.recorded, self.tail = False, 0
        self.pads, self.num_reqs, self.num_tokens = pads, num_reqs, most
        self.query_len, self.pad_seq_len, self.uniform = query_len, pad_seq_len, uniform
        self._addresses = np.array([arena.address for arena in arenas], np.int64)
        self._own(
            STEP_SHAPE, arenas=address_of(self._addresses, np.int64), max_rows=self.max_rows, pads=pads,
            num_reqs=num_reqs, num_tokens=self.num_tokens, query_len=query_len, pad_seq_len=pad_seq_len,
            uniform=uniform,
        )  # fmt: skip

    def commit(self, step: int) -> None:
        if self.device is not None:
            self.device[:] = self.sources[step % len(self.sources)]
