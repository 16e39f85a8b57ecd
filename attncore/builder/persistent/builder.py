"""The persistent door: one call a step, from the batch's own state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import arguments, env, graphs
from attncore.arguments import INT32_MAX
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.device.arena import ArenaRing, Capacity, Field
from attncore.builder.device.transport import attached, new_side
from attncore.builder.lists.builder import CommonMetadataBuilder
from attncore.builder.lists.sequence_group import Sequence, SequenceGroup
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.persistent import refusals
from attncore.builder.persistent.backends import backends_of
from attncore.builder.persistent.captured_sizes import Buckets
from attncore.builder.persistent.input_batch import InputBatch
from attncore.builder.persistent.overlap import Overlap
from attncore.builder.persistent.poison import POISON, expiring
from attncore.builder.persistent.step_metadata import FIELD_NAMES, StepMetadata
from attncore.errors import AttncoreError, CaptureError
from attncore.kernels import codes

FillField = Callable[[StepMetadata, npt.NDArray[Any]], None]

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

    ``transport``: how a step reaches a device with its own memory. ``graph``: nodes of captured graphs fetch it;
    ``copy``: one packed copy and an event, on a CPU too, where otherwise nothing is copied; ``auto``: ``graph`` where
    it proves to work, else ``copy``. The attribute of that name says which it is, and ``why_transport`` why.

    ``ticket``, for engines that replay their graphs by themselves: each step's number is written to the device, in
    stream order, when it is built. It costs a launch a step, and ``metadata.replay`` is not needed.

    ``num_rejected``, for engines that build a step while the last one runs: int32[max_num_reqs] on the device, where
    the engine's sampler leaves, by row of its step, how many of the tokens were rejected. ``build(overlapped=True)``
    then takes the host's lengths for upper bounds and corrects the device's.
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
        transport: str = "auto",
        ticket: bool = False,
        num_rejected: Any = None,
        depth: int = 2,
    ) -> None:
        arguments.integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        arguments.integer("decode_threshold", decode_threshold, 1)
        arguments.integer("depth", depth, 1)
        if not isinstance(batch, InputBatch):
            raise TypeError(f"batch: {batch!r} is not an InputBatch")
        if max_num_encoder_tokens is None:
            max_num_encoder_tokens = max(max_num_batched_tokens, batch.max_encoder_len)
        arguments.integer("max_num_encoder_tokens", max_num_encoder_tokens, 1)
        self.batch, self.max_num_batched_tokens = batch, max_num_batched_tokens
        self.max_num_encoder_tokens, self.decode_threshold = max_num_encoder_tokens, decode_threshold
        self.context_parallel = context_parallel
        self._backends = backends_of(batch, backend, context_parallel)
        self._transport, self._depth, self._ticket = transport, depth, bool(ticket)
        self._poison = env.poison()
        self._extra: dict[str, tuple[Field, FillField]] = {}
        self._num_rejected = num_rejected
        if num_rejected is not None:
            self._overlap = Overlap(self._backends, batch, num_rejected, context_parallel)
            field = Field("previous_rows", np.int32, per_request=1)
            self._extra["previous_rows"] = field, self._overlap.fill
        self._closed = False
        self._lay_out()

    def _lay_out(self) -> None:
        """Takes all memory: arenas, the device's side, the kernel over them."""
        batch, transport = self.batch, self._transport
        has_cross = batch._cross is not None
        max_num_encoder_tokens, max_num_batched_tokens = self.max_num_encoder_tokens, self.max_num_batched_tokens
        self._side = new_side(transport, self._backends.device, list(batch._tables.values()), self._backends.page_lists)
        self._ring = ArenaRing(
            Capacity(max_num_batched_tokens, batch.max_num_reqs, max_num_encoder_tokens if has_cross else 0),
            [table.group.tokens_per_column for table in batch._decoders],
            has_cross,
            self._depth,
            extra=[field for field, _ in self._extra.values()],
            journal_entries=self._side.journal_entries if self._side else 0,
            allocate=self._side.pinned if self._side else None,
        )
        if self._side is not None:
            self._side.ticket = self._ticket
            self._side = attached(self._side, self._ring, transport)
            self._side.num_rejected = self._num_rejected
            self._follow()
        elif self._num_rejected is not None:
            raise ValueError("num_rejected: steps are read where they are built; transport='copy' makes steps overlap")
        self._buckets = Buckets(batch, self._ring, self._backends, self._side, self)
        self._eager = self._buckets.eager(max_num_batched_tokens, max_num_encoder_tokens)
        self._buckets.make_all()
        self._query_lens = np.zeros(batch.max_num_reqs, np.int32)
        self._swaps = np.zeros((batch.max_num_reqs, 2), np.int32)
        ranks = self.context_parallel
        self._kernel = batch.kernels.StepKernel(
            batch._rows,
            self._eager,
            self._query_lens,
            self._swaps,
            np.zeros(batch.max_num_reqs, np.int8),
            batch.max_model_len,
            max_num_batched_tokens,
            max_num_encoder_tokens,
            self.decode_threshold,
            ranks.world_size if ranks else 1,
            ranks.rank if ranks else 0,
            ranks.interleave if ranks else 1,
        )
        device = self._backends.device
        self._is_capturing = self._side.is_capturing if self._side else partial(graphs.is_capturing, device)
        # A step that is planned or sent takes the longer way, which holds the batch until both are done.
        self._longer = bool(self._backends.plans or self._extra) or self._side is not None or self._poison
        self._decode_step = _not_this_way if self._longer else self._kernel.decode_step
        self._padded_step = _not_this_way if self._longer else self._kernel.padded_step

    def _follow(self) -> None:
        """Tables on a device follow the batch's from now on: those of one builder, from nothing."""
        other = self.batch._follower() if self.batch._follower else None
        if other is not None and other is not self and not other._closed:
            raise ValueError("batch: another builder's tables on a device follow it; close that builder first")
        self.batch._follower = weakref.ref(self)
        if self._side is not None:
            self._side.forget_tables()

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return str(self.batch.kernels.IMPLEMENTATION)

    @property
    def last_step(self) -> int:
        """The number of the last step that was built; -1: none."""
        return int(self._kernel.next_step) - 1

    @property
    def transport(self) -> str:
        """``"graph"``, ``"copy"`` or, where steps are read where they are built, ``"none"``."""
        return self._side.road if self._side else "none"

    @property
    def why_transport(self) -> str:
        """One sentence: why steps reach the device as they do."""
        return self._side.why if self._side else "steps are read where they are built, on the CPU"

    @property
    def nbytes(self) -> int:
        """Memory of the arenas, host and device, and of the device's tables and page indices, bytes."""
        return self._ring.nbytes + (self._side.nbytes if self._side else 0)

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that ``capture`` was called for, ascending: requests of a padded step."""
        return tuple(sorted(self._buckets))

    def build(
        self,
        scheduled: Mapping[Any, int] = _EVERYBODY,
        *,
        query_len: int = 1,
        bucket: int | None = None,
        overlapped: bool = False,
    ) -> StepMetadata:
        """The metadata of this step; advances every request by the tokens it runs.

        ``scheduled`` names the exceptions: tokens of this step by request. Those not named run ``query_len`` tokens,
        those named with 0 have no row. ``bucket``, one of ``captured``, pads the step to that size, for the replay of a
        graph. The backend's ``plan`` runs before it returns. Raises ValueError, with everything left as it was, where a
        token has no block of its own, a limit is exceeded, a name is unknown or the step does not fit the bucket, and
        CaptureError where the bucket was not captured or a stream is capturing.
        """
        size = None
        if overlapped or self._num_rejected is not None:
            self._begin_overlapped(overlapped)
        if bucket is None and query_len == 1 and not scheduled:
            metadata = self._decode_step()
            if metadata is not None:
                return metadata  # type: ignore[no-any-return]
        elif bucket is not None:
            if not self._longer:
                self._refuse_while_capturing("build")
                if query_len == 1 and not scheduled:
                    metadata = self._padded_step(bucket)
                    if metadata is not None:
                        return metadata  # type: ignore[no-any-return]
            size = self._buckets.find(bucket)
        with self.batch._entered:
            if size is None and not self._longer:
                return self._arranged_step(None, scheduled, query_len)[1]
            return self._answer(self._built(size, scheduled, query_len))

    def capture(self, num_reqs: int, query_len: int = 1) -> StepMetadata:
        """Metadata to capture a graph over: a step of no requests, padded to ``num_reqs`` rows of ``query_len`` tokens.

        Its arrays lie at the fixed addresses that every later step of ``bucket=num_reqs`` has; its max_seq_len is the
        largest. It is planned as any step. Call it before the capture begins; a size captured once is given again.
        Raises ValueError beyond the builder's capacity or the backend's level of capture.
        """
        arguments.integer("num_reqs", num_reqs, 1)
        arguments.integer("query_len", query_len, 1)
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
            known = num_reqs in self.captured
            self._kernel.add_bucket(self._buckets.add(num_reqs, query_len))
            try:
                metadata = self._empty_step(num_reqs, capturing=True)
                on_cpu = self._backends.device.startswith("cpu")
                return self._buckets.at_capture(metadata) if on_cpu else self._answer(metadata)
            except BaseException:
                if not known:
                    self._buckets.drop(num_reqs)
                    self._kernel.drop_bucket(num_reqs)
                raise

    def build_empty(self, bucket: int) -> StepMetadata:
        """A step of no requests in a captured size, for a warm-up or dummy replay: planned like any other."""
        self._refuse_while_capturing("build_empty")
        self._buckets.find(bucket)
        with self.batch._entered:
            return self._answer(self._empty_step(bucket, capturing=False))

    def build_profile(self, query_lens: Iterable[int]) -> CommonAttentionMetadata:
        """Metadata of a profiling run, before there is a cache: requests of ``query_lens`` tokens without blocks.

        Slots are -1 and tables empty, so that a model runs without a cache, to see what memory it takes. The batch is
        not touched. Arrays are the caller's to keep. Raises ValueError beyond the builder's capacity.
        """
        lens = list(query_lens)
        if len(lens) > self.batch.max_num_reqs:
            raise ValueError(f"query_lens: {len(lens)} requests exceed max_num_reqs {self.batch.max_num_reqs}")
        if sum(lens) > self.max_num_batched_tokens:
            raise ValueError(
                f"query_lens: {sum(lens)} tokens exceed max_num_batched_tokens {self.max_num_batched_tokens}"
            )
        layout = "flashinfer" if 0 in self._backends.page_lists else "flash"
        backend = next(iter(self._backends.by_group.values()))
        prompts = [Sequence(row, query_len, 0, None) for row, query_len in enumerate(lens)]
        built = CommonMetadataBuilder(self.batch.groups[0].tokens_per_column, layout, backend=backend)
        return built.build([SequenceGroup(True, prompts)])

    def _empty_step(self, bucket: int, *, capturing: bool) -> StepMetadata:
        size = self._buckets.find(bucket)
        self._acquire()
        metadata: StepMetadata = self._kernel.empty_step(size, self.batch.max_model_len if capturing else 0)
        self._plan_and_send(size, metadata, self.batch.num_rows, waits=not capturing)
        return metadata

    def host_lengths(self, metadata: StepMetadata) -> str:
        """``"bounded"`` for a step that was built overlapped, whose lengths on the host are upper bounds."""
        return self._overlap.lengths_of(metadata) if self._num_rejected is not None else "exact"

    def register_field(self, name: str, dtype: Any, per: str, fill: FillField) -> None:
        """A field of the engine's own that rides along: ``metadata.name`` on the device, ``metadata.host.name``.

        ``per`` is ``"token"`` (T elements) or ``"request"`` (n). ``fill(metadata, out)`` writes a step's values:
        ``out`` is a host array of zeros, in the order of ``metadata.req_ids``; each build calls it, before the plan.
        Raises ValueError where the name is taken, and CaptureError once a step was built or a size captured.
        """
        if not isinstance(name, str) or not name.isidentifier() or hasattr(StepMetadata, name) or name in FIELD_NAMES:
            raise ValueError(f"name: {name!r} is not a free name for a field of metadata")
        if name in self._extra:
            raise ValueError(f"name: {name!r} is registered already")
        if per not in ("token", "request"):
            raise ValueError(f"per: {per!r} is neither token nor request")
        if not callable(fill):
            raise TypeError(f"fill: {fill!r} is not a function of metadata and the array to fill")
        kind = np.dtype(dtype)
        if kind.kind not in "iufb":
            raise TypeError(f"dtype: {kind} is not one of numbers")
        if self._kernel.next_step or self.captured:
            raise CaptureError("register_field: steps were built already; register fields before the first")
        field = Field(name, kind.type, per_token=int(per == "token"), per_request=int(per == "request"))
        self._extra[name] = field, fill
        self._lay_out()

    def release(self, num_reqs: int) -> None:
        """The graph that was captured over a size is gone: it may be captured again, and the builder closed."""
        self._buckets.find(num_reqs)
        with self.batch._entered:
            bucket = self._buckets.drop(num_reqs)
            self._kernel.drop_bucket(num_reqs)
            if self._side is not None:
                self._side.release(bucket)

    def close(self) -> None:
        """Waits for the device and gives the arenas back; no step can be built afterwards.

        CaptureError while graphs that read the arenas are there: ``release`` them first.
        """
        with self.batch._entered:
            if self._closed:
                return
            if self._side is not None:
                sizes = self._side.recorded()
                if sizes:
                    raise CaptureError(
                        f"close: graphs of {', '.join(map(str, sizes))} requests read the arenas; destroy them and "
                        "call builder.release(size) for each"
                    )
                self._side.close()
            self._closed = self._longer = True
            self._decode_step = self._padded_step = _not_this_way

    def _answer(self, metadata: StepMetadata) -> StepMetadata:
        return expiring(metadata) if self._poison else metadata

    def _record(self, metadata: StepMetadata) -> None:
        if not metadata.use_cuda_graph:
            raise CaptureError("record: this step was built without a bucket; capture over builder.capture(num_reqs)")
        if self._side is not None:
            self._side.record(self._buckets.of(metadata))

    def _replay(self, metadata: StepMetadata, graph: Any) -> None:
        if not metadata.use_cuda_graph:
            raise CaptureError("replay: this step was built without a bucket; build(bucket=...) makes one for a graph")
        self._refuse_while_capturing("replay")
        if self._side is None:
            graph.replay()
        else:
            self._side.replay(metadata.step, graph)

    def _abandon(self, metadata: StepMetadata) -> None:
        with self.batch._entered:
            step = metadata.step
            if step != self._kernel.next_step - 1 or self._side is None or not self._side.abandon(step):
                raise CaptureError(f"abandon: step {step} is not waiting for a replay; nothing is to be taken back")
            self._take_back(self._buckets.of(metadata), metadata, self._rows_before)

    def _refuse_while_capturing(self, what: str) -> None:
        if self._is_capturing():
            raise CaptureError(
                f"{what}: a stream is capturing; it plans and copies, which a graph must not record. Call it before "
                "the capture begins, and before each replay"
            )

    def _built(self, bucket: Any, scheduled: Mapping[Hashable, int], query_len: int) -> StepMetadata:
        """A step, its plan and its way to the device; where one fails, none of them happened."""
        self._refuse_while_capturing("build")
        batch = self.batch
        num_rows = batch.num_rows
        self._acquire()
        metadata = None
        if not scheduled and query_len == 1:
            size = bucket or self._buckets.eager(num_rows, 0)
            metadata = self._kernel.decode_step_inside(size)
        if metadata is None:
            size, metadata = self._arranged_step(bucket, scheduled, query_len)
        self._plan_and_send(size, metadata, num_rows)
        return metadata

    def _begin_overlapped(self, overlapped: bool) -> None:
        if self._num_rejected is None:
            raise ValueError("overlapped: this builder was made without num_rejected, so lengths must be exact")
        self._overlap.overlapped = overlapped

    def _acquire(self) -> None:
        """Waits until the device has read the arena that the next step is written to."""
        if self._closed:
            raise AttncoreError("builder: closed; make another one")
        if self._side is not None:
            self._side.check_ready()
            step = self._kernel.next_step
            self._side.wait(step - self._ring.depth)
            if self._backends.waits_for_last_plan:  # a library's own staging is one buffer
                self._side.wait(step - 1)
        if self._poison:
            arena = self._kernel.next_step % self._ring.depth
            self._ring.memory[arena][:] = POISON
            self._kernel.forget_arena(arena)

    def _plan_and_send(self, size: Any, metadata: StepMetadata, num_rows: int, *, waits: bool = True) -> None:
        """The step's plan and its way to the device; ``num_rows`` were the batch's before it.

        ``waits``: a padded step is for a graph, which will be replayed over it.
        """
        batch, side = self.batch, self._side
        self._rows_before = num_rows
        try:
            if self._extra:
                for name, (_, fill) in self._extra.items():
                    out = getattr(metadata.host, name)
                    out[:] = 0
                    fill(metadata, out)
            if self._backends.plans:
                self._backends.plan(metadata)
            if side is not None:
                arena = metadata._arena
                side.send(arena.step, size, arena, len(batch._ids), waits and size.pads)
                if side.road == "copy":
                    for index in side.page_lists:
                        _ = metadata.groups[batch.groups[index].name].paged_kv_indices
            elif size.pads:
                size.commit(metadata.step)
            if self._num_rejected is not None:
                self._overlap.built(metadata)
        except BaseException:
            self._take_back(size, metadata, num_rows)
            raise

    def _take_back(self, size: Any, metadata: StepMetadata, num_rows: int) -> None:
        """Undoes the last step: tokens, rows and its number."""
        if self._side is not None:
            self._side.forget_tables()
        moves = metadata.moves
        self._kernel.undo(size, len(moves))
        self.batch._take_back(moves, num_rows)

    def _arranged_step(
        self, bucket: Any, scheduled: Mapping[Hashable, int], query_len: int
    ) -> tuple[Any, StepMetadata]:
        batch, kernel = self.batch, self._kernel
        if not isinstance(scheduled, Mapping):
            raise TypeError(f"scheduled: {scheduled!r} is not a mapping of request to tokens")
        arguments.integer("query_len", query_len, 1)
        kernel.schedule_all(query_len)
        self._schedule(scheduled)
        code, row, token, group = kernel.check()
        if code != codes.OK:
            raise refusals.refused_step(
                batch, code, row, token, group, self._query_lens, self.max_num_batched_tokens,
                self.max_num_encoder_tokens,
            )  # fmt: skip
        if bucket is not None:
            code, row, count = kernel.check_bucket(bucket)
            if code != codes.OK:
                raise refusals.refused_bucket(batch, code, row, count, self._query_lens, bucket)

        num_swaps, num_decodes, num_reqs = kernel.arrange()
        moves = tuple(map(tuple, self._swaps[:num_swaps].tolist())) if num_swaps else ()
        batch._take_moves(moves)
        batch._rows.req_ids = tuple(batch._ids[:num_reqs])
        # Until a row comes, goes or sits out, the next step of everybody has these rows.
        batch._rows.dirty = num_reqs != batch.num_rows
        batch._rows.changes += num_swaps > 0
        size = bucket or (self._eager if self._side is None else self._buckets.eager(*self._tokens_of_step()))
        metadata: StepMetadata = kernel.step(size, num_decodes, num_reqs)
        metadata._arena.moves = moves
        return size, metadata

    def _tokens_of_step(self) -> tuple[int, int]:
        """Tokens, and encoder tokens, of the step that ``query_lens`` says."""
        query_lens = self._query_lens[: self.batch.num_rows]
        _, lens, done = self.batch._state[:, : len(query_lens)]
        return int(query_lens.sum()), int(lens[(query_lens > 0) & (done == 0)].sum())

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
            if not 0 <= num_tokens <= INT32_MAX:
                raise ValueError(f"scheduled: {num_tokens} tokens of {req_id!r} is outside 0..{INT32_MAX}")
            query_lens[row] = num_tokens
