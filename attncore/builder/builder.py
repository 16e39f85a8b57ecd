"""The persistent door: one call a step, from the batch's own state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from attncore import graphs, slots
from attncore.builder import problems
from attncore.builder.backends import backends_of
from attncore.builder.buckets import Buckets
from attncore.builder.context_parallel import ContextParallel
from attncore.builder.input_batch import InputBatch
from attncore.builder.staging import Size, StagingRing
from attncore.builder.step_metadata import StepMetadata, step_metadata
from attncore.errors import CaptureError

_EVERYBODY: Mapping[Any, int] = MappingProxyType({})


def _not_this_way(*_: int) -> None:
    return None


class MetadataBuilder:
    """Builds the metadata of one step after another from ``batch``, for ``backend``.

    ``backend`` None gives NumPy arrays; a backend's metadata holds torch tensors on its device. With several KV-cache
    groups it is one backend a group, by name. ``depth`` arenas are used in turn: metadata is valid until ``depth``
    builds later. ``nbytes`` is their memory. One thread at a time.

    A request is a decode where it runs up to ``decode_threshold`` tokens in a step (1 + drafts, for speculative
    decoding), a prefill where it runs more. ``max_num_encoder_tokens`` bounds the encoder tokens of a step (default:
    one longest encoder, or ``max_num_batched_tokens`` where that is more). With ``context_parallel``, slots, lengths
    and pages are those of this rank's cache, and the batch's block size is the virtual one.
    """

    def __init__(
        self,
        batch: InputBatch,
        backend: Any = None,
        *,
        max_num_batched_tokens: int,
        max_num_encoder_tokens: int | None = None,
        decode_threshold: int = 1,
        context_parallel: ContextParallel | None = None,
        depth: int = 2,
    ) -> None:
        slots._integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        slots._integer("decode_threshold", decode_threshold, 1)
        slots._integer("depth", depth, 1)
        if not isinstance(batch, InputBatch):
            raise TypeError(f"batch: {batch!r} is not an InputBatch")
        if max_num_encoder_tokens is None:
            max_num_encoder_tokens = max(max_num_batched_tokens, batch.max_encoder_len)
        slots._integer("max_num_encoder_tokens", max_num_encoder_tokens, 1)
        self.batch, self.max_num_batched_tokens = batch, max_num_batched_tokens
        self.max_num_encoder_tokens, self.decode_threshold = max_num_encoder_tokens, decode_threshold
        self.context_parallel = context_parallel
        self._backends = backends_of(batch, backend, context_parallel)
        has_cross = batch._cross is not None
        self._ring = StagingRing(
            Size(max_num_batched_tokens, batch.max_num_reqs, max_num_encoder_tokens if has_cross else 0),
            [table.group.tokens_per_column for table in batch._decoders],
            has_cross,
            depth,
        )
        arenas, metadata = [], []
        for views in self._ring.views(self._ring.size):
            arenas.append(batch.kernels.StepArena(views.fields, views.groups, has_cross))
            metadata.append(step_metadata(arenas[-1], views, batch, self._backends.wraps))
        self._eager = batch.kernels.StepBucket(arenas, metadata)
        self._query_lens = np.zeros(batch.max_num_reqs, np.int32)
        self._swaps = np.zeros((batch.max_num_reqs, 2), np.int32)
        ranks = context_parallel
        self._kernel = batch.kernels.StepKernel(
            batch._rows,
            self._eager,
            self._query_lens,
            self._swaps,
            np.zeros(batch.max_num_reqs, np.int8),
            batch.max_model_len,
            max_num_batched_tokens,
            max_num_encoder_tokens,
            decode_threshold,
            ranks.world_size if ranks else 1,
            ranks.rank if ranks else 0,
            ranks.interleave if ranks else 1,
        )
        self._buckets = Buckets(batch, self._ring, self._backends)
        # A step that must be planned takes the longer way, which holds the batch until the plan is made.
        self._plans = bool(self._backends.plans)
        self._decode_step = _not_this_way if self._plans else self._kernel.decode_step
        self._padded_step = _not_this_way if self._plans else self._kernel.padded_step

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return str(self.batch.kernels.IMPLEMENTATION)

    @property
    def nbytes(self) -> int:
        """Memory of the arenas, bytes."""
        return self._ring.nbytes

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that ``capture`` was called for, ascending: requests of a padded step."""
        return tuple(sorted(self._buckets))

    def build(
        self, scheduled: Mapping[Any, int] = _EVERYBODY, *, query_len: int = 1, bucket: int | None = None
    ) -> StepMetadata:
        """The metadata of this step; advances every request by the tokens it runs.

        ``scheduled`` names the exceptions: tokens of this step by request. Those not named run ``query_len`` tokens,
        those named with 0 have no row. ``bucket``, one of ``captured``, pads the step to that size, for the replay of a
        graph. The backend's ``plan`` runs before it returns. Raises ValueError, with everything left as it was, where a
        token has no block of its own, a limit is exceeded, a name is unknown or the step does not fit the bucket, and
        CaptureError where the bucket was not captured or a stream is capturing.
        """
        if bucket is not None or self._plans:
            self._refuse_while_capturing("build")
        if not scheduled and query_len == 1:
            metadata = self._decode_step() if bucket is None else self._padded_step(bucket)
            if metadata is not None:
                return metadata  # type: ignore[no-any-return]
        size = self._eager if bucket is None else self._buckets.find(bucket)
        with self.batch._entered:
            return self._built(size, scheduled, query_len)

    def capture(self, num_reqs: int, query_len: int = 1) -> StepMetadata:
        """Metadata to capture a graph over: a step of no requests, padded to ``num_reqs`` rows of ``query_len`` tokens.

        Its arrays lie at the fixed addresses that every later step of ``bucket=num_reqs`` has; its max_seq_len is the
        largest. It is planned as any step. Call it before the capture begins; a size captured once is given again.
        Raises ValueError beyond the builder's capacity or the backend's level of capture.
        """
        slots._integer("num_reqs", num_reqs, 1)
        slots._integer("query_len", query_len, 1)
        self._refuse_while_capturing("capture")
        if query_len > self.decode_threshold:
            raise ValueError(
                f"query_len: {query_len} is above decode_threshold {self.decode_threshold}; graphs hold decodes only"
            )
        if num_reqs > self.batch.max_num_reqs:
            raise ValueError(f"num_reqs: {num_reqs} exceed the batch's max_num_reqs {self.batch.max_num_reqs}")
        if num_reqs * query_len > self.max_num_batched_tokens:
            raise ValueError(
                f"num_reqs: {num_reqs} of {query_len} tokens exceed max_num_batched_tokens "
                f"{self.max_num_batched_tokens}"
            )
        with self.batch._entered:
            self._kernel.add_bucket(self._buckets.add(num_reqs, query_len))
            return self._null_step(num_reqs, capturing=True)

    def build_null(self, bucket: int) -> StepMetadata:
        """A step of no requests in a captured size, for a warm-up or dummy replay: planned like any other."""
        self._refuse_while_capturing("build_null")
        self._buckets.find(bucket)
        with self.batch._entered:
            return self._null_step(bucket, capturing=False)

    def _null_step(self, bucket: int, *, capturing: bool) -> StepMetadata:
        size = self._buckets.find(bucket)
        metadata: StepMetadata = self._kernel.null_step(size, self.batch.max_model_len if capturing else 0)
        try:
            self._backends.plan(metadata)
        except BaseException:
            self._kernel.undo(size, 0)
            raise
        size.commit(metadata.step)
        return metadata

    def _refuse_while_capturing(self, what: str) -> None:
        if graphs.is_capturing(self._backends.device):
            raise CaptureError(
                f"{what}: a stream is capturing; it plans and copies, which a graph must not record. Call it before "
                "the capture begins, and before each replay"
            )

    def _built(self, bucket: Any, scheduled: Mapping[Hashable, int], query_len: int) -> StepMetadata:
        """A step, its plan and its way to the device; where one fails, none of them happened."""
        batch = self.batch
        num_rows = batch.num_rows
        metadata = self._kernel.decode_step_inside(bucket) if not scheduled and query_len == 1 else None
        if metadata is None:
            metadata = self._arranged_step(bucket, scheduled, query_len)
        try:
            self._backends.plan(metadata)
        except BaseException:
            self._kernel.undo(bucket, len(metadata.moves))
            batch._take_back(metadata.moves, num_rows)
            raise
        if bucket.pads:
            bucket.commit(metadata.step)
        return metadata

    def _arranged_step(self, bucket: Any, scheduled: Mapping[Hashable, int], query_len: int) -> StepMetadata:
        batch, kernel = self.batch, self._kernel
        if not isinstance(scheduled, Mapping):
            raise TypeError(f"scheduled: {scheduled!r} is not a mapping of request to tokens")
        slots._integer("query_len", query_len, 1)
        kernel.schedule_all(query_len)
        self._schedule(scheduled)
        code, row, token, group = kernel.check()
        if code != slots.OK:
            raise problems.refused_step(batch, code, row, token, group, self._query_lens, self.max_num_batched_tokens)
        if bucket.pads:
            code, row, count = kernel.check_bucket(bucket)
            if code != slots.OK:
                raise problems.refused_bucket(batch, code, row, count, self._query_lens, bucket)

        num_swaps, num_decodes, num_reqs = kernel.arrange()
        moves = tuple(map(tuple, self._swaps[:num_swaps].tolist())) if num_swaps else ()
        batch._take_moves(moves)
        batch._rows.req_ids = tuple(batch._ids[:num_reqs])
        # Until a row comes, goes or sits out, the next step of everybody has these rows.
        batch._rows.dirty = num_reqs != batch.num_rows
        batch._rows.changes += num_swaps > 0
        metadata: StepMetadata = kernel.step(bucket, num_decodes, num_reqs)
        metadata._arena.moves = moves
        return metadata

    def _schedule(self, scheduled: Mapping[Hashable, int]) -> None:
        """Writes the exceptions to so many tokens a row."""
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
