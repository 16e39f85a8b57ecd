"""CommonAttentionState: what a backend keeps from step to step, such as the buffers that captured graphs read."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

from attncore import arguments
from attncore.builder.first_generation_names import FirstGenerationStateNames
from attncore.builder.lists.captured_steps import NOTHING, CapturedSteps, set_host
from attncore.builder.lists.unfinished import settle
from attncore.builder.slices import own_arrays
from attncore.errors import CaptureError
from attncore.graphs import refuse_while_capturing
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.lists.builder import CommonMetadataBuilder
    from attncore.builder.lists.sequence_group import SequenceGroup
    from attncore.builder.metadata import CommonAttentionMetadata
    from attncore.builder.slices import HostArrays


class CommonAttentionState(FirstGenerationStateNames):
    """What a backend keeps from step to step beside its plan: by default, the buffers that captured graphs read.

    An engine makes one per device, by ``backend.get_state_cls()``; a library that keeps wrappers or workspaces
    subclasses it and names the subclass as ``state_class``. ``builder`` is the CommonMetadataBuilder of the steps to
    replay and says how they are padded; without it there are no buffers (the persistent builder captures by itself).
    ``backend`` None gives NumPy arrays.

    At start-up, inside ``with state.graph_capture(max_batch_size)``: for each size ``metadata_for_capture(size)``, a
    warm-up, and the capture of the model over it. For each step: ``builder.build(groups, state.pad_size(n))``,
    ``prepare(metadata)``, ``begin_forward(metadata)``, and the replay. All on one stream, in one thread.
    """

    def __init__(self, backend: Any = None, builder: CommonMetadataBuilder | None = None) -> None:
        self._backend, self._builder = backend, builder
        if builder is not None and builder.backend is not backend:
            raise ValueError("builder: made for another backend than this state; make both with the same")
        self._device: str = "cpu" if backend is None else backend.config.device
        self._only: int | None = None  # the captured size of a clone
        self._steps = CapturedSteps()

    @property
    def backend(self) -> Any:
        """The backend that steps are planned by. Like ``builder`` it does not change: buffers and graphs are of it."""
        return self._backend

    @property
    def builder(self) -> CommonMetadataBuilder | None:
        """The builder whose steps are replayed. For one with other settings make another state."""
        return self._builder

    @property
    def captured(self) -> tuple[int, ...]:
        """The captured sizes, ascending: requests of a padded step."""
        return self._steps.metadata.sizes(self._only)

    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """A context manager for the capture of graphs of at most ``max_batch_size`` requests.

        It allocates the buffers, once: all captured graphs read the same addresses. Sizes can be captured only inside
        it; the buffers stay afterwards. Raises ValueError where the backend captures no graphs or the builder has no
        ``max_seq_len_to_capture``, and CaptureError inside another ``graph_capture``, while a stream is capturing, or
        where captured graphs read smaller buffers.
        """
        max_batch_size = arguments.integer("max_batch_size", max_batch_size, 1)
        spec = self.backend.config.spec if self.backend is not None else None
        if spec is not None and spec.cuda_graph == "never":
            raise ValueError(
                f"max_batch_size: {self.backend.name} cannot be captured in a graph; run steps without one"
            )
        if self.builder is not None and self.builder.max_seq_len_to_capture is None:
            raise ValueError("builder: made without max_seq_len_to_capture, which says how long captured sequences get")
        return contextmanager(self._open)(max_batch_size)

    def _open(self, max_batch_size: int) -> Generator[None]:
        """The generator of one ``graph_capture``, which knows itself."""
        itself: list[weakref.ref[Any]] = []
        capturing = self._capturing(max_batch_size, itself)
        itself.append(weakref.ref(capturing))
        return capturing

    def _capturing(self, max_batch_size: int, itself: list[weakref.ref[Any]]) -> Generator[None]:
        if self._steps.limit:
            raise CaptureError("graph_capture: open already; capture all sizes inside one")
        refuse_while_capturing(self._device, "graph_capture")
        if self.builder is not None:
            self._steps.allocate(self.builder, None if self.backend is None else self._device, max_batch_size)
        # No ``finally`` ends it, which an interrupt could end first: sizes are captured while this generator runs.
        self._steps.most = max_batch_size
        self._steps.open_in = itself[0]
        yield

    def graph_clone(self, batch_size: int) -> Self:
        """A state for the graph of one size, which shares the buffers with this one."""
        batch_size = arguments.integer("batch_size", batch_size, 1)
        if batch_size not in self.captured:
            self._check_capturable(batch_size, "graph_clone")
        clone = copy.copy(self)
        clone._only = batch_size
        return clone

    def metadata_for_capture(self, batch_size: int) -> CommonAttentionMetadata:
        """Metadata to capture a graph of ``batch_size`` decodes over: an empty step, with the largest lengths.

        Its arrays are the buffers, at the addresses that every later step of the size has. Unlike those of a built
        step, all are as long as the graph: ``query_start_loc`` repeats its last value, and ``paged_kv_indices`` has
        room for all pages. It is planned, where the backend plans; call it before the capture of the stream begins. For
        a size captured before, the buffers hold an empty step again.
        """
        refuse_while_capturing(self._device, "metadata_for_capture")
        batch_size = arguments.integer("batch_size", batch_size, 1)
        builder, steps = self._check_capturable(batch_size, "metadata_for_capture"), self._steps
        with builder.enter():  # who writes to the buffers is inside it
            metadata = steps.metadata.get(batch_size)
            if metadata is None:
                metadata = steps.new_metadata(builder, batch_size)
                if self.backend is not None:
                    self.backend.prepare_capture(metadata, builder)
            steps.prepared = NOTHING
            set_host(metadata, steps.buffers.write_empty(batch_size), builder.last_step + 1)
            if self.backend is not None and self.backend.has_plan:
                self.backend.plan(metadata)
            steps.metadata[batch_size] = metadata
            builder.last_step = metadata.step
            steps.prepared = metadata, metadata.advanced
        return metadata

    def _check_capturable(self, batch_size: int, what: str) -> CommonMetadataBuilder:
        """The builder; ValueError or CaptureError where ``batch_size`` cannot be captured now."""
        limit = self._steps.limit
        if self.builder is None:
            raise ValueError(f"{what}: this state has no builder to say how steps are padded; make it with builder=")
        if not limit:
            raise CaptureError(f"{what}: call it inside `with state.graph_capture(max_batch_size)`")
        if batch_size > limit:
            raise CaptureError(f"{what}: {batch_size} requests exceed the {limit} of graph_capture; open it with more")
        if self._only not in (None, batch_size):
            raise CaptureError(f"{what}: {counted(batch_size, 'request')}, but this clone is for {self._only}")
        return self.builder

    def graph_input_buffers(self, metadata: CommonAttentionMetadata) -> dict[str, Any]:
        """The arrays, by name, that the graph of this step's size reads; CaptureError where there is none."""
        captured = self._steps.metadata[self._steps.size_of(metadata, self._only)]
        return {name: getattr(captured, name) for name in self._steps.buffers.names}

    def pad_size(self, num_reqs: int) -> int:
        """The ``cuda_graph_pad_size`` for ``num_reqs`` decodes, up to the next captured size; -1 beyond the largest."""
        num_reqs = arguments.integer("num_reqs", num_reqs, 1)
        return min((bucket - num_reqs for bucket in self.captured if bucket >= num_reqs), default=-1)

    def prepare(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Writes a step that was built with ``pad_size`` to the buffers, for the replay of its size's graph.

        Returns the metadata that the graph was captured over. On CUDA it waits only for the copy of the step before the
        last; call it on the stream that replays. Raises ValueError for a step that no graph of this builder can run,
        and CaptureError for a size that was not captured and while a stream is capturing, and ConcurrentUseError while
        the step's builder is inside another call; the buffers have not changed then.
        """
        refuse_while_capturing(self._device, "prepare")
        steps = self._steps
        bucket = steps.size_of(metadata, self._only)
        if self.builder is None:  # no size is captured without one
            raise ValueError("prepare: this state has no builder; make it with builder=")
        builder = self.builder if metadata.source is None else metadata.source.builder
        with builder.enter():  # it advances the step
            settle(metadata)
            steps.check_fits(metadata, self.builder)
            captured, step = steps.metadata[bucket], own_arrays(metadata.host)
            if captured is metadata:
                self._check_prepared(metadata, "prepare")
            else:
                copies = steps.buffers.copies(step, bucket)
                steps.prepared = NOTHING
                set_host(captured, steps.buffers.write(step, bucket, copies), metadata.step)
                if "_kept" in vars(metadata):  # the plan of the step
                    vars(captured)["_kept"] = metadata.kept
                steps.prepared = metadata, metadata.advanced
        return captured

    def build(self, groups: Iterable[SequenceGroup], cuda_graph_pad_size: int) -> CommonAttentionMetadata:
        """``builder.build`` and ``prepare`` in one call: without a copy between them, where the backend plans nothing.

        Returns the metadata of the build, but with arrays in the buffers: they are valid until the next step is written
        there, and it cannot ``advance_step``. With a ``cuda_graph_pad_size`` of -1 it only builds. Raises what the two
        raise; the buffers have not changed then.
        """
        builder, steps = self.builder, self._steps
        cuda_graph_pad_size = arguments.integer("cuda_graph_pad_size", cuda_graph_pad_size, -1)
        if builder is None:
            raise ValueError("build: this state has no builder; make it with builder=")
        if cuda_graph_pad_size == -1 or builder.plan is not None or builder.encoder_decoder:
            metadata = builder.build(groups, cuda_graph_pad_size)
            if metadata.use_cuda_graph:
                self.prepare(metadata)
            return metadata
        refuse_while_capturing(self._device, "build")
        counts = 0, 0, 0

        def allocate(num_seqs: int, num_reqs: int, num_tokens: int, width: int, num_pages: int) -> HostArrays:
            nonlocal counts
            steps.check_size(num_reqs, self._only)
            steps.check_counts(num_reqs, num_tokens, num_pages)
            counts, steps.prepared = (num_seqs, num_reqs, num_pages), NOTHING
            return steps.buffers.reserve(num_seqs, num_reqs, num_pages)

        def commit(metadata: CommonAttentionMetadata) -> None:
            set_host(steps.metadata[metadata.num_reqs], steps.buffers.commit(*counts), metadata.step)
            metadata.source = None
            steps.prepared = metadata, 0

        return builder._build(groups, cuda_graph_pad_size, allocate, commit)

    def begin_forward(self, metadata: Any) -> None:
        """Called by the engine once per step, before the first layer or the replay.

        By default it only checks: CaptureError for a step that is padded for a graph and was not prepared since it was
        built or advanced, and for the metadata of a captured size where the buffers hold no whole step of the size.
        """
        if getattr(metadata, "from_groups", False) and metadata.use_cuda_graph:
            self._check_prepared(metadata, "begin_forward")

    def _check_prepared(self, metadata: CommonAttentionMetadata, what: str) -> None:
        prepared, advanced = self._steps.prepared
        if prepared is metadata and advanced == metadata.advanced:
            return
        size = self._steps.size_of(metadata, self._only)
        if self._steps.metadata[size] is not metadata:
            raise CaptureError(
                f"{what}: this step is padded for a graph, but the buffers do not hold it; call "
                "state.prepare(metadata) first, or build without padding and run the step without a graph"
            )
        if prepared is None or prepared.num_reqs != size:
            raise CaptureError(
                f"{what}: metadata that a graph of {counted(size, 'request')} was captured over, but the buffers hold "
                "no whole step of this size (a call was interrupted, or another size was written since); prepare a "
                "step of this size, or call metadata_for_capture"
            )


AttentionState = CommonAttentionState
"""The name of the class in the contract."""
