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


class MetadataBuilder:
    """Builds the metadata of one step after another from ``batch``, for ``backend``.

    ``backend`` None gives NumPy arrays; a backend's metadata holds torch tensors on its device. ``depth`` arenas are
    used in turn: metadata is valid until ``depth`` builds later. ``nbytes`` is their memory. One thread at a time.
    """

    def __init__(self, batch: InputBatch, backend: Any = None, *, max_num_batched_tokens: int, depth: int = 2) -> None:
        slots._at_least("max_num_batched_tokens", max_num_batched_tokens, 1)
        slots._at_least("depth", depth, 1)
        if max_num_batched_tokens > slots.INT32_MAX:
            raise ValueError(f"max_num_batched_tokens: {max_num_batched_tokens} does not fit int32")
        if backend is not None:
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
        self._decode_step = self._kernel.decode_step
        self._plan: Any = backend.plan if backend is not None and backend.has_plan else None
        self._moves_owed: tuple[tuple[int, int], ...] = ()

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
                if self._plan is not None:
                    with self.batch._entered:
                        self._plan_or_undo(metadata)
                return metadata  # type: ignore[no-any-return]
        with self.batch._entered:
            metadata = self._arranged_step(scheduled)
            if self._plan is not None:
                self._plan_or_undo(metadata)
            return metadata

    def _arranged_step(self, scheduled: Mapping[Hashable, int]) -> StepMetadata:
        batch, kernel = self.batch, self._kernel
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
        metadata: StepMetadata = kernel.step(num_decodes, num_reqs)
        metadata._arena.moves, self._moves_owed = self._moves_owed + moves, ()
        return metadata

    def _plan_or_undo(self, metadata: StepMetadata) -> None:
        """The backend's plan for the step; where it fails, the batch is at the tokens it was at before.

        Rows that moved stay where they are: the caller learns of them from the next step's ``moves``.
        """
        try:
            self._plan(metadata)
        except BaseException:
            batch = self.batch
            batch._state[0, : metadata.num_reqs] = metadata.host.context_lens
            batch._rows.dirty = True
            self._moves_owed = metadata.moves
            raise

    def _schedule(self, scheduled: Mapping[Hashable, int]) -> None:
        """Writes the exceptions to one token a row."""
        batch, query_lens = self.batch, self._query_lens
        for row in batch._holes:
            query_lens[row] = 0
        for row in batch._paused:
            query_lens[row] = 0
        for req_id, num_tokens in scheduled.items():
            row = batch._row_of.get(req_id, -1)
            if row < 0:
                raise ValueError(f"scheduled: {req_id!r} is not in the batch")
            if isinstance(num_tokens, bool) or not hasattr(num_tokens, "__index__"):
                raise TypeError(f"scheduled: {num_tokens!r} tokens of {req_id!r} is not an integer")
            if not 0 <= num_tokens <= slots.INT32_MAX:
                raise ValueError(f"scheduled: {num_tokens} tokens of {req_id!r} is outside 0..{slots.INT32_MAX}")
            query_lens[row] = num_tokens
