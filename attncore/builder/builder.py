"""The persistent door: one call a step, from the batch's own state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from attncore import slots
from attncore.builder import problems
from attncore.builder.input_batch import InputBatch
from attncore.builder.metadata import identity
from attncore.builder.staging import StagingRing
from attncore.builder.step_metadata import StepMetadata

_EVERYBODY: Mapping[Any, int] = MappingProxyType({})


def _not_this_way() -> None:
    return None


class MetadataBuilder:
    """Builds the metadata of one step after another from ``batch``, for ``backend``.

    ``backend`` None gives NumPy arrays; a backend's metadata holds torch tensors on its device. ``depth`` arenas are
    used in turn: metadata is valid until ``depth`` builds later. ``nbytes`` is their memory. One thread at a time.
    """

    def __init__(self, batch: InputBatch, backend: Any = None, *, max_num_batched_tokens: int, depth: int = 2) -> None:
        slots._integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        slots._integer("depth", depth, 1)
        if not isinstance(batch, InputBatch):
            raise TypeError(f"batch: {batch!r} is not an InputBatch")
        if backend is not None:
            if not hasattr(backend, "config"):
                raise TypeError(f"backend: {backend!r} is not a backend; attncore.select(...).create() makes one")
            if backend.config.device.split(":")[0] != "cpu":
                raise ValueError(
                    f"backend: {backend.name!r} runs on {backend.config.device}; this version builds for the CPU only"
                )
            if backend.config.block_size != batch.block_size:
                raise ValueError(
                    f"batch: its block_size {batch.block_size} is not the backend's {backend.config.block_size}; "
                    "use choice.block_size"
                )
        self.batch, self.max_num_batched_tokens = batch, max_num_batched_tokens
        ring = StagingRing(max_num_batched_tokens, batch.max_num_reqs, depth)
        self.nbytes = ring.nbytes
        self._arenas = [batch.kernels.StepArena(fields) for fields in ring.arenas]
        wrap = identity if backend is None else backend.from_host
        self._metadata = [StepMetadata(*pair, batch, wrap) for pair in zip(self._arenas, ring.arenas, strict=True)]
        self._query_lens = np.zeros(batch.max_num_reqs, np.int32)
        self._swaps = np.zeros((batch.max_num_reqs, 2), np.int32)
        self._kernel = batch.kernels.StepKernel(
            batch._rows,
            self._arenas,
            self._metadata,
            self._query_lens,
            self._swaps,
            batch.max_model_len,
            max_num_batched_tokens,
        )
        self._plan: Any = backend.plan if backend is not None and backend.has_plan else None
        # A step that must be planned takes the longer way, which holds the batch until the plan is made.
        self._decode_step = self._kernel.decode_step if self._plan is None else _not_this_way

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return str(self.batch.kernels.IMPLEMENTATION)

    def build(self, scheduled: Mapping[Any, int] = _EVERYBODY) -> StepMetadata:
        """The metadata of this step; advances every request by the tokens it runs.

        ``scheduled`` names the exceptions: tokens of this step by request. Those not named run one token; those named
        with 0 have no row. The backend's ``plan`` runs before it returns. Raises ValueError, with everything left as it
        was, where a token has no block of its own, a limit is exceeded or a name is unknown.
        """
        if not scheduled:
            metadata = self._decode_step()
            if metadata is not None:
                return metadata  # type: ignore[no-any-return]
        with self.batch._entered:
            if self._plan is None:
                return self._arranged_step(scheduled)
            return self._planned_step(scheduled)

    def _planned_step(self, scheduled: Mapping[Hashable, int]) -> StepMetadata:
        """A step and the backend's plan for it; where the plan fails, neither happened."""
        batch = self.batch
        num_rows = batch.num_rows
        metadata = None if scheduled else self._kernel.decode_step_inside()
        if metadata is None:
            metadata = self._arranged_step(scheduled)
        try:
            self._plan(metadata)
        except BaseException:
            self._kernel.undo(len(metadata.moves))
            batch._take_back(metadata.moves, num_rows)
            raise
        return metadata

    def _arranged_step(self, scheduled: Mapping[Hashable, int]) -> StepMetadata:
        batch, kernel = self.batch, self._kernel
        if not isinstance(scheduled, Mapping):
            raise TypeError(f"scheduled: {scheduled!r} is not a mapping of request to tokens")
        kernel.schedule_all()
        self._schedule(scheduled)
        code, row, token = kernel.check()
        if code != slots.OK:
            raise problems.refused_step(batch, code, row, token, self._query_lens, self.max_num_batched_tokens)

        num_swaps, num_decodes, num_reqs = kernel.arrange()
        moves = tuple(map(tuple, self._swaps[:num_swaps].tolist())) if num_swaps else ()
        batch._take_moves(moves)
        batch._rows.req_ids = tuple(batch._ids[:num_reqs])
        # Until a row comes, goes or sits out, the next step of everybody has these rows.
        batch._rows.dirty = num_reqs != batch.num_rows
        batch._rows.changes += num_swaps > 0
        metadata: StepMetadata = kernel.step(num_decodes, num_reqs)
        metadata._arena.moves = moves
        return metadata

    def _schedule(self, scheduled: Mapping[Hashable, int]) -> None:
        """Writes the exceptions to one token a row."""
        batch, query_lens = self.batch, self._query_lens
        for row in batch._holes:
            query_lens[row] = 0
        for row in batch._paused:
            query_lens[row] = 0
        for req_id, num_tokens in scheduled.items():
            row = batch._row_of.get(req_id, -1)  # a key of a mapping: it is hashable
            if row < 0:
                raise ValueError(f"scheduled: {req_id!r} is not in the batch")
            if isinstance(num_tokens, bool) or not hasattr(num_tokens, "__index__"):
                raise TypeError(f"scheduled: {num_tokens!r} tokens of {req_id!r} is not an integer")
            if not 0 <= num_tokens <= slots.INT32_MAX:
                raise ValueError(f"scheduled: {num_tokens} tokens of {req_id!r} is outside 0..{slots.INT32_MAX}")
            query_lens[row] = num_tokens
