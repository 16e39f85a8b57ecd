"""What a backend keeps from step to step: the buffers that captured graphs of the list door read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

from attncore import slots
from attncore._aliases import FirstGenerationStateNames
from attncore.builder.graph_buffers import GraphBuffers
from attncore.builder.metadata import CommonAttentionMetadata, identity
from attncore.errors import CaptureError
from attncore.graphs import refuse_while_capturing

if TYPE_CHECKING:
    from attncore.builder.common import CommonMetadataBuilder


_NOTHING: tuple[Any, int] = (None, 0)


class _Captured:
    """What a state and its clones share."""

    def __init__(self) -> None:
        self.limit = 0
        """Largest size that may be captured now; 0 outside ``graph_capture``."""
        self.buffers: GraphBuffers | None = None
        self.metadata: dict[int, CommonAttentionMetadata] = {}
        self.prepared = _NOTHING
        """The step that the buffers hold, and how often it had been advanced."""


class CommonAttentionState(FirstGenerationStateNames):
    """What a backend keeps from step to step beside its plan: by default, where captured graphs find a step.

    Made by the engine once a device, through ``backend.get_state_cls()``; a library that keeps wrappers or workspaces
    subclasses it and names the subclass as ``state_class``. ``builder``, the CommonMetadataBuilder of the steps to
    replay, says how they are padded; without one (for the persistent door, whose builder captures by itself) there are
    no buffers. ``backend`` None: NumPy arrays.

    At start-up, inside ``with state.graph_capture(max_batch_size)``: for each size ``metadata_for_capture(size)``, a
    warm-up, the capture of the model over it. Then, a step: ``builder.build(groups, state.pad_size(n))``,
    ``prepare(metadata)``, ``begin_forward(metadata)``, the replay. All on one stream.
    """

    def __init__(self, backend: Any = None, builder: CommonMetadataBuilder | None = None) -> None:
        self.backend, self.builder = backend, builder
        if builder is not None and builder.backend is not backend:
            raise ValueError("builder: made for another backend than this state; make both with the same")
        self._device: str = "cpu" if backend is None else backend.config.device
        self._only: int | None = None  # a clone's size
        self._captured = _Captured()

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that metadata was captured for, ascending: requests of a padded step."""
        sizes = sorted(self._captured.metadata)
        return tuple(size for size in sizes if self._only in (None, size))

    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Entered by the engine around the capture of graphs of at most ``max_batch_size`` requests.

        Allocates the buffers, once: their addresses are those of every graph captured. After it nothing more is
        captured; the buffers stay. Raises ValueError where the backend captures no graphs or the builder names no
        ``max_seq_len_to_capture``, CaptureError inside another, inside a capture, or beyond buffers that graphs use.
        """
        slots._integer("max_batch_size", max_batch_size, 1)
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
        shared = self._captured
        if shared.limit:
            raise CaptureError("graph_capture: open already; capture all sizes inside one")
        refuse_while_capturing(self._device, "graph_capture")
        if self.builder is not None:
            found = shared.buffers
            if found is not None and found.max_batch_size < max_batch_size and shared.metadata:
                raise CaptureError(
                    f"graph_capture: {max_batch_size} requests, but the graphs captured so far read buffers of "
                    f"{found.max_batch_size}; make a new state and capture anew"
                )
            if found is None or found.max_batch_size < max_batch_size:
                device = None if self.backend is None else self._device
                shared.buffers = GraphBuffers(self.builder, device, max_batch_size)
        shared.limit = max_batch_size
        try:
            yield
        finally:
            shared.limit = 0

    def graph_clone(self, batch_size: int) -> Self:
        """A state for the graph of one size, which shares the buffers."""
        if batch_size not in self._captured.metadata:
            self._check_capturable(batch_size, "graph_clone")
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
        buffers = self._check_capturable(batch_size, "metadata_for_capture")
        metadata = self._captured.metadata.get(batch_size) or self._null_metadata(buffers, batch_size)
        self._captured.prepared = _NOTHING
        metadata.host = buffers.write_null(batch_size)
        if self.backend is not None and self.backend.has_plan:
            self.backend.plan(metadata)
        self._captured.metadata[batch_size] = metadata
        self._captured.prepared = metadata, metadata.advanced
        return metadata

    def graph_input_buffers(self, metadata: CommonAttentionMetadata) -> dict[str, Any]:
        """The arrays by name that the graph of this step's size reads. CaptureError where there is none."""
        size = self._size_of(metadata)
        assert self._captured.buffers is not None
        return {name: getattr(self._captured.metadata[size], name) for name in self._captured.buffers.names}

    def pad_size(self, num_reqs: int) -> int:
        """The ``cuda_graph_pad_size`` to build ``num_reqs`` decodes with: to the next captured size, -1 beyond all."""
        slots._integer("num_reqs", num_reqs, 1)
        return min((size - num_reqs for size in self.captured if size >= num_reqs), default=-1)

    def prepare(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Brings a step, built with ``pad_size``, to the buffers, for the replay of its size's graph.

        Answers the metadata that the graph was captured over. Waits for nothing on CUDA; call it on the stream that
        replays. Raises ValueError for a step that no graph of this builder can run, CaptureError for a size that was
        not captured and while a stream is capturing. The buffers are as they were then.
        """
        refuse_while_capturing(self._device, "prepare")
        size = self._size_of(metadata)
        buffers, captured = self._captured.buffers, self._captured.metadata[size]
        assert buffers is not None
        self._check_fits(metadata, buffers)
        self._captured.prepared = _NOTHING
        captured.host = buffers.write(metadata.host, size)
        self._captured.prepared = metadata, metadata.advanced
        return captured

    def begin_forward(self, metadata: Any) -> None:
        """Called by the engine once a step, before the first layer, or the replay.

        CaptureError for a step that is padded for a graph and was not prepared since it was built or advanced. Does
        nothing else by default.
        """
        if getattr(metadata, "from_groups", False) and metadata.use_cuda_graph:
            self._check_prepared(metadata)

    def _check_prepared(self, metadata: CommonAttentionMetadata) -> None:
        held, advanced = self._captured.prepared
        if held is metadata and advanced == metadata.advanced:
            return
        if self._captured.metadata.get(self._size_of(metadata)) is not metadata:
            raise CaptureError(
                "begin_forward: this step is padded for a graph, but the buffers do not hold it; call "
                "state.prepare(metadata) first, or build without padding and run the step without a graph"
            )

    def _size_of(self, metadata: CommonAttentionMetadata) -> int:
        """The captured size that a step was padded to."""
        if not getattr(metadata, "from_groups", False):
            raise ValueError("metadata: not of CommonMetadataBuilder; MetadataBuilder.capture is for the other door")
        if not metadata.use_cuda_graph:
            raise ValueError(
                "metadata: not padded for a graph; build it with cuda_graph_pad_size=state.pad_size(number of decodes)"
            )
        if metadata.num_reqs not in self.captured:
            known = ", ".join(map(str, self.captured)) or "none"
            raise CaptureError(
                f"metadata: padded to {metadata.num_reqs} requests, which was not captured (captured: {known}); build "
                "with cuda_graph_pad_size=state.pad_size(number of decodes), which is -1 where the step runs without"
            )
        return metadata.num_reqs

    def _check_capturable(self, batch_size: int, what: str) -> GraphBuffers:
        slots._integer("batch_size", batch_size, 1)
        shared = self._captured
        if self.builder is None:
            raise ValueError(f"{what}: this state has no builder to say how steps are padded; make it with builder=")
        if not shared.limit or shared.buffers is None:
            raise CaptureError(f"{what}: call it inside `with state.graph_capture(max_batch_size)`")
        if batch_size > shared.limit:
            raise CaptureError(
                f"{what}: {batch_size} requests exceed the {shared.limit} of graph_capture; open it with as many"
            )
        if self._only not in (None, batch_size):
            raise CaptureError(f"{what}: {batch_size} requests, but this clone is for {self._only}")
        return shared.buffers

    def _check_fits(self, metadata: CommonAttentionMetadata, buffers: GraphBuffers) -> None:
        """Raises ValueError unless the step is one that the buffers can hold."""
        host, builder = metadata.host, self.builder
        assert builder is not None
        if metadata.num_tokens != metadata.num_reqs:
            raise ValueError(
                f"metadata: {metadata.num_tokens} tokens in {metadata.num_reqs} rows; graphs hold decodes of one "
                "token, so run the step without one"
            )
        for name, held in (("paged_kv_indptr", buffers.has_pages), ("encoder_seq_lens", buffers.has_encoder)):
            if hasattr(host, name) != held:
                raise ValueError(
                    f"metadata: {'without' if held else 'with'} {name}, unlike the graphs; build it with the builder "
                    "of this state"
                )
        widths = [("block_table", buffers.width)]
        if buffers.has_encoder:
            widths.append(("cross_block_table", buffers.cross_width))
        for name, width in widths:
            found = getattr(host, name).shape[1]
            if found != width:
                raise ValueError(
                    f"metadata: a {name} {found} wide, but the graphs read {width}; build it with the builder of this "
                    "state"
                )
        if metadata.max_decode_seq_len > (builder.max_seq_len_to_capture or 0):
            raise ValueError(
                f"metadata: a length of {metadata.max_decode_seq_len} exceeds max_seq_len_to_capture "
                f"{builder.max_seq_len_to_capture}; run the step without a graph"
            )
        if buffers.has_pages and len(host.paged_kv_indices) > buffers.max_pages:
            raise ValueError(
                f"metadata: {len(host.paged_kv_indices)} pages, but the graphs have room for {buffers.max_pages}; run "
                "the step without a graph, or capture longer sequences (max_seq_len_to_capture)"
            )

    def _null_metadata(self, buffers: GraphBuffers, size: int) -> CommonAttentionMetadata:
        builder = self.builder
        assert builder is not None
        longest = builder.max_seq_len_to_capture
        metadata = CommonAttentionMetadata(
            None,
            identity if self.backend is None else self.backend.from_host,
            num_reqs=size,
            num_tokens=size,
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=size,
            num_decode_tokens=size,
            max_query_len=1,
            max_seq_len=longest,
            max_prefill_seq_len=0,
            max_decode_seq_len=longest,
            use_cuda_graph=True,
            max_decode_query_len=1,
            from_groups=True,
            **buffers.views(size),
        )
        if builder.encoder_decoder:
            metadata.max_encoder_seq_len = builder.max_encoder_seq_len_to_capture or metadata.max_seq_len
            metadata.num_encoder_tokens = size * metadata.max_encoder_seq_len
        # A backend reads the views inside a capture, where no other arrays may be made: the decodes are the whole step.
        vars(metadata).update(_prefill=None, _decode=metadata)
        return metadata


AttentionState = CommonAttentionState
"""The name by which the contract has it."""
