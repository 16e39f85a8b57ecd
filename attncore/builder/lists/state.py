"""What a backend keeps from step to step: the buffers that captured graphs of the list door read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from attncore import arguments
from attncore.builder.first_generation import FirstGenerationStateNames
from attncore.builder.lists.captured_steps import NOTHING, CapturedSteps
from attncore.errors import CaptureError
from attncore.graphs import refuse_while_capturing

if TYPE_CHECKING:
    from attncore.builder.lists.builder import CommonMetadataBuilder
    from attncore.builder.lists.sequence_group import SequenceGroup
    from attncore.builder.metadata import CommonAttentionMetadata


class CommonAttentionState(FirstGenerationStateNames):
    """What a backend keeps from step to step beside its plan: by default, where captured graphs find a step.

    Made by the engine once a device, through ``backend.get_state_cls()``; a library that keeps wrappers or workspaces
    subclasses it and names the subclass as ``state_class``. ``builder``, the CommonMetadataBuilder of the steps to
    replay, says how they are padded; without one (for the persistent door, whose builder captures by itself) there are
    no buffers. ``backend`` None: NumPy arrays.

    At start-up, inside ``with state.graph_capture(max_batch_size)``: for each size ``metadata_for_capture(size)``, a
    warm-up, the capture of the model over it. Then, a step: ``builder.build(groups, state.pad_size(n))``,
    ``prepare(metadata)``, ``begin_forward(metadata)``, the replay. All on one stream, in one thread.
    """

    def __init__(self, backend: Any = None, builder: CommonMetadataBuilder | None = None) -> None:
        self.backend = backend
        self.builder: CommonMetadataBuilder | None = builder
        if builder is not None and builder.backend is not backend:
            raise ValueError("builder: made for another backend than this state; make both with the same")
        self._device: str = "cpu" if backend is None else backend.config.device
        self._only: int | None = None  # a clone's size
        self._steps = CapturedSteps()

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that metadata was captured for, ascending: requests of a padded step."""
        return self._steps.metadata.sizes(self._only)

    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Entered by the engine around the capture of graphs of at most ``max_batch_size`` requests.

        Allocates the buffers, once: their addresses are those of every graph captured. After it nothing more is
        captured; the buffers stay. Raises ValueError where the backend captures no graphs or the builder names no
        ``max_seq_len_to_capture``, CaptureError inside another, inside a capture, or beyond buffers that graphs use.
        """
        arguments.integer("max_batch_size", max_batch_size, 1)
        spec = self.backend.config.spec if self.backend is not None else None
        if spec is not None and spec.cuda_graph == "never":
            raise ValueError(
                f"max_batch_size: {self.backend.name} cannot be captured in a graph; run steps without one"
            )
        if self.builder is not None and self.builder.max_seq_len_to_capture is None:
            raise ValueError("builder: made without max_seq_len_to_capture, which says how long captured sequences get")
        return self._capturing(max_batch_size)

    @contextmanager
    def _capturing(self, max_batch_size: int) -> Iterator[None]:
        if self._steps.limit:
            raise CaptureError("graph_capture: open already; capture all sizes inside one")
        refuse_while_capturing(self._device, "graph_capture")
        if self.builder is not None:
            self._steps.allocate(self.builder, None if self.backend is None else self._device, max_batch_size)
        self._steps.limit = max_batch_size
        try:
            yield
        finally:
            self._steps.limit = 0

    def graph_clone(self, batch_size: int) -> Self:
        """A state for the graph of one size, which shares the buffers."""
        if batch_size not in self.captured:
            self._capturable(batch_size, "graph_clone")
        clone = copy.copy(self)
        clone._only = batch_size
        return clone

    def metadata_for_capture(self, batch_size: int) -> CommonAttentionMetadata:
        """Metadata to capture a graph of ``batch_size`` decodes over: padding alone, with the largest lengths.

        Its arrays are the buffers, at the addresses that every later step of the size has. Unlike a built step's all
        are as long as the graph: ``query_start_loc`` repeats its last value, ``paged_kv_indices`` has room for all
        pages. It is planned, where the backend plans; call it before the capture of the stream begins. A size captured
        before is padding again.
        """
        refuse_while_capturing(self._device, "metadata_for_capture")
        builder, steps = self._capturable(batch_size, "metadata_for_capture"), self._steps
        metadata = steps.metadata.get(batch_size)
        if metadata is None:
            metadata = steps.new_metadata(builder, batch_size)
            if self.backend is not None:
                self.backend.prepare_capture(metadata, builder)
        steps.prepared = NOTHING
        metadata.host = steps.buffers.write_empty(batch_size)
        if self.backend is not None and self.backend.has_plan:
            self.backend.plan(metadata)
        steps.metadata[batch_size] = metadata
        return metadata

    def _capturable(self, batch_size: int, what: str) -> CommonMetadataBuilder:
        """The builder, where ``batch_size`` may be captured now."""
        arguments.integer("batch_size", batch_size, 1)
        limit = self._steps.limit
        if self.builder is None:
            raise ValueError(f"{what}: this state has no builder to say how steps are padded; make it with builder=")
        if not limit:
            raise CaptureError(f"{what}: call it inside `with state.graph_capture(max_batch_size)`")
        if batch_size > limit:
            raise CaptureError(f"{what}: {batch_size} requests exceed the {limit} of graph_capture; open it with more")
        if self._only not in (None, batch_size):
            raise CaptureError(f"{what}: {batch_size} requests, but this clone is for {self._only}")
        return self.builder

    def graph_input_buffers(self, metadata: CommonAttentionMetadata) -> dict[str, Any]:
        """The arrays by name that the graph of this step's size reads. CaptureError where there is none."""
        captured = self._steps.metadata[self._steps.size_of(metadata, self._only)]
        return {name: getattr(captured, name) for name in self._steps.buffers.names}

    def pad_size(self, num_reqs: int) -> int:
        """The ``cuda_graph_pad_size`` to build ``num_reqs`` decodes with: to the next captured size, -1 beyond all."""
        arguments.integer("num_reqs", num_reqs, 1)
        return min((size - num_reqs for size in self.captured if size >= num_reqs), default=-1)

    def prepare(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Brings a step, built with ``pad_size``, to the buffers, for the replay of its size's graph.

        Answers the metadata that the graph was captured over. Waits for nothing on CUDA but a copy of two steps ago;
        call it on the stream that replays. Raises ValueError for a step that no graph of this builder can run,
        CaptureError for a size that was not captured and while a stream is capturing. The buffers are as they were
        then.
        """
        refuse_while_capturing(self._device, "prepare")
        steps = self._steps
        size = steps.size_of(metadata, self._only)
        assert self.builder is not None
        steps.check_fits(metadata, self.builder)
        captured, steps.prepared = steps.metadata[size], NOTHING
        if captured is not metadata:
            captured.host = steps.buffers.write(metadata.host, size)
        steps.prepared = metadata, metadata.advanced
        return captured

    def build(self, groups: Iterable[SequenceGroup], cuda_graph_pad_size: int) -> CommonAttentionMetadata:
        """``builder.build`` and ``prepare`` in one: without a copy between them, where the backend plans nothing.

        The metadata is that of the build, but its arrays lie in the buffers: they are valid until another step comes
        there, and it cannot ``advance_step``. A ``cuda_graph_pad_size`` of -1 is a build alone. Raises what the two
        raise; the buffers are as they were then.
        """
        builder, steps = self.builder, self._steps
        if builder is None:
            raise ValueError("build: this state has no builder; make it with builder=")
        metadata: CommonAttentionMetadata
        if cuda_graph_pad_size == -1 or builder.plan is not None or builder.encoder_decoder:
            metadata = builder.build(groups, cuda_graph_pad_size)
            if metadata.use_cuda_graph:
                self.prepare(metadata)
            return metadata
        refuse_while_capturing(self._device, "build")
        shape = 0, 0, 0

        def room(num_seqs: int, num_reqs: int, num_tokens: int, width: int, num_pages: int) -> SimpleNamespace:
            nonlocal shape
            steps.check_size(num_reqs, self._only)
            steps.check_counts(num_reqs, num_tokens, num_pages)
            shape, steps.prepared = (num_seqs, num_reqs, num_pages), NOTHING
            return steps.buffers.room(num_seqs, num_reqs, num_pages)

        metadata = builder._build(groups, cuda_graph_pad_size, room)
        steps.metadata[metadata.num_reqs].host = steps.buffers.written(*shape)
        metadata.source = None
        steps.prepared = metadata, 0
        return metadata

    def begin_forward(self, metadata: Any) -> None:
        """Called by the engine once a step, before the first layer, or the replay.

        CaptureError for a step that is padded for a graph and was not prepared since it was built or advanced. Does
        nothing else by default.
        """
        if getattr(metadata, "from_groups", False) and metadata.use_cuda_graph:
            self._check_prepared(metadata)

    def _check_prepared(self, metadata: CommonAttentionMetadata) -> None:
        prepared, advanced = self._steps.prepared
        if prepared is metadata and advanced == metadata.advanced:
            return
        if self._steps.metadata[self._steps.size_of(metadata, self._only)] is not metadata:
            raise CaptureError(
                "begin_forward: this step is padded for a graph, but the buffers do not hold it; call "
                "state.prepare(metadata) first, or build without padding and run the step without a graph"
            )


AttentionState = CommonAttentionState
"""The name by which the contract has it."""
