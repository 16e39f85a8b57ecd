"""The persistent builder: one call a step, from the batch's own state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from attncore import arguments, env
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.fields import Length, engine_field
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.persistent.assembly import Assembly
from attncore.builder.persistent.backends import backends_of
from attncore.builder.persistent.engine_fields import EngineFields, FillField
from attncore.builder.persistent.input_batch import InputBatch
from attncore.builder.persistent.overlap import PREVIOUS_ROWS, Overlap
from attncore.builder.persistent.poison import expiring
from attncore.builder.persistent.profile import profile_metadata
from attncore.builder.persistent.settings import checked_settings
from attncore.builder.persistent.step_metadata import StepMetadata
from attncore.errors import CaptureError

_ALL_REQUESTS: Mapping[Any, int] = MappingProxyType({})


def _no_short_way(*_: Any) -> None:
    """In place of the kernel's own calls where a step has to be planned, sent or filled by an engine."""


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
        if not isinstance(batch, InputBatch):
            raise TypeError(f"batch: {batch!r} is not an InputBatch")
        self._settings = checked_settings(
            max_num_batched_tokens, max_num_encoder_tokens, decode_threshold, context_parallel, transport, ticket,
            depth, batch.max_encoder_len,
        )  # fmt: skip
        self.batch, self._core = batch, batch.core
        self.max_num_batched_tokens = self._settings.max_num_batched_tokens
        self.max_num_encoder_tokens = self._settings.max_num_encoder_tokens
        self.decode_threshold, self.context_parallel = self._settings.decode_threshold, context_parallel
        self._backends = backends_of(self._core, backend, context_parallel)
        self._poison = env.poison()
        self._engine_fields, self._overlap = EngineFields(), None
        if num_rejected is not None:
            self._overlap = Overlap(self._backends, batch.max_num_reqs, num_rejected, context_parallel)
            self._engine_fields.add(engine_field(PREVIOUS_ROWS, np.int32, Length.REQUEST), self._overlap.fill)
        self._lay_out()

    def _lay_out(self) -> None:
        """Takes all memory, and settles which way a step takes."""
        self._assembly = Assembly(
            self._core, self._backends, self._settings, self._engine_fields, self._overlap, self, self._poison
        )
        side, kernel = self._assembly.side, self._assembly.kernel
        if side is not None:
            self._follow()
        self._refuse_while_capturing = self._assembly.refuse_while_capturing
        # A step that is planned or sent takes the longer way, which holds the batch until both are done.
        self._longer = bool(self._backends.plans or self._engine_fields) or side is not None or self._poison
        self._decode_step = _no_short_way if self._longer else kernel.decode_step
        self._padded_step = _no_short_way if self._longer else kernel.padded_step

    def _follow(self) -> None:
        """Tables on a device follow the batch's from now on: those of one builder, from nothing."""
        other = self._core.follower() if self._core.follower else None
        if other is not None and other is not self and not other._assembly.closed:
            raise ValueError("batch: another builder's tables on a device follow it; close that builder first")
        self._core.follower = weakref.ref(self)
        if self._assembly.side is not None:
            self._assembly.side.tables.forget()

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return self.batch.kernels

    @property
    def last_step(self) -> int:
        """The number of the last step that was built; -1: none."""
        return self._assembly.last_step

    @property
    def transport(self) -> str:
        """``"graph"``, ``"copy"`` or, where steps are read where they are built, ``"none"``."""
        return self._assembly.side.name if self._assembly.side else "none"

    @property
    def why_transport(self) -> str:
        """One sentence: why steps reach the device as they do."""
        side = self._assembly.side
        return side.why if side else "steps are read where they are built, on the CPU"

    @property
    def nbytes(self) -> int:
        """Memory of the arenas, host and device, and of the device's tables and page indices, bytes."""
        return self._assembly.nbytes

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that ``capture`` was called for, ascending: requests of a padded step."""
        return self._assembly.shapes.captured.sizes()

    def build(
        self,
        scheduled: Mapping[Any, int] = _ALL_REQUESTS,
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
        shape = None
        if overlapped or self._overlap is not None:
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
            shape = self._assembly.shapes.find(bucket)
        with self._core.entered:
            if shape is None and not self._longer:
                return self._assembly.arrange(None, scheduled, query_len)[1]
            self._refuse_while_capturing("build")
            return self._answer(self._assembly.build(shape, scheduled, query_len))

    def capture(self, num_reqs: int, query_len: int = 1) -> StepMetadata:
        """Metadata to capture a graph over: a step of no requests, padded to ``num_reqs`` rows of ``query_len`` tokens.

        Its arrays lie at the fixed addresses that every later step of ``bucket=num_reqs`` has; its max_seq_len is the
        largest. It is planned as any step. Call it before the capture begins; a size captured once is given again.
        Raises ValueError beyond the builder's capacity or the backend's level of capture.
        """
        num_reqs = arguments.integer("num_reqs", num_reqs, 1)
        query_len = arguments.integer("query_len", query_len, 1)
        self._refuse_while_capturing("capture")
        self._check_capacity(num_reqs, query_len)
        assembly = self._assembly
        with self._core.entered:
            known = num_reqs in self.captured
            assembly.kernel.add_shape(assembly.shapes.capture(num_reqs, query_len))
            try:
                metadata = assembly.build_empty(num_reqs, capturing=True)
                on_cpu = self._backends.device.startswith("cpu")
                return assembly.shapes.at_capture(metadata) if on_cpu else self._answer(metadata)
            except BaseException:
                if not known:
                    assembly.shapes.captured.pop(num_reqs)
                    assembly.kernel.drop_shape(num_reqs)
                raise

    def _check_capacity(self, num_reqs: int, query_len: int) -> None:
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

    def build_empty(self, bucket: int) -> StepMetadata:
        """A step of no requests in a captured size, for a warm-up or dummy replay: planned like any other."""
        self._refuse_while_capturing("build_empty")
        self._assembly.shapes.find(bucket)
        with self._core.entered:
            return self._answer(self._assembly.build_empty(bucket, capturing=False))

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
        self._refuse_while_capturing("build_profile")
        backend = next(iter(self._backends.by_group.values()))
        return profile_metadata(lens, has_pages=0 in self._backends.page_lists, backend=backend)

    def host_lengths(self, metadata: StepMetadata) -> str:
        """``"bounded"`` for a step that was built overlapped, whose lengths on the host are upper bounds."""
        return self._overlap.lengths_of(metadata) if self._overlap is not None else "exact"

    def register_field(self, name: str, dtype: Any, per: str, fill: FillField) -> None:
        """A field of the engine's own that rides along: ``metadata.name`` on the device, ``metadata.host.name``.

        ``per`` is ``"token"`` (T elements) or ``"request"`` (n). ``fill(metadata, out)`` writes a step's values:
        ``out`` is a host array of zeros, in the order of ``metadata.req_ids``; each build calls it, before the plan.
        Raises ValueError where the name is taken, and CaptureError once a step was built or a size captured.
        """
        if self._assembly.kernel.next_step or self.captured:
            raise CaptureError("register_field: steps were built already; register fields before the first")
        self._engine_fields.register(name, dtype, per, fill)
        self._lay_out()

    def release(self, num_reqs: int) -> None:
        """The graph that was captured over a size is gone: it may be captured again, and the builder closed."""
        assembly = self._assembly
        shape = assembly.shapes.find(num_reqs)
        with self._core.entered:
            assembly.shapes.captured.pop(num_reqs)
            assembly.kernel.drop_shape(num_reqs)
            if assembly.side is not None:
                assembly.side.release(shape)

    def close(self) -> None:
        """Waits for the device and gives the arenas back; no step can be built afterwards.

        CaptureError while graphs that read the arenas are there: ``release`` them first.
        """
        assembly = self._assembly
        with self._core.entered:
            if assembly.closed:
                return
            if assembly.side is not None:
                sizes = assembly.side.recorded()
                if sizes:
                    raise CaptureError(
                        f"close: graphs of {', '.join(map(str, sizes))} requests read the arenas; destroy them and "
                        "call builder.release(size) for each"
                    )
                assembly.side.close()
            assembly.closed = self._longer = True
            self._decode_step = self._padded_step = _no_short_way

    def _answer(self, metadata: StepMetadata) -> StepMetadata:
        return expiring(metadata) if self._poison else metadata

    def _begin_overlapped(self, overlapped: bool) -> None:
        if self._overlap is None:
            raise ValueError("overlapped: this builder was made without num_rejected, so lengths must be exact")
        self._overlap.overlapped = overlapped
