"""The steps that graphs of the list builder were captured over: their metadata, their buffers, and checks of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attncore.builder.device.captured_sizes import CapturedSizes
from attncore.builder.lists.graph_buffers import GraphBuffers
from attncore.builder.metadata import OF_ARRAYS, CommonAttentionMetadata
from attncore.builder.read_only import read_only
from attncore.builder.reused import Reused
from attncore.errors import CaptureError
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings
    from attncore.builder.slices import HostArrays

NOTHING: tuple[Any, int] = (None, 0)


def set_host(metadata: CommonAttentionMetadata, host: HostArrays, step: int) -> None:
    """Gives a captured size's metadata the host arrays and the number of another step; what was made of the last one's
    arrays is dropped."""
    held = vars(metadata)
    for name in OF_ARRAYS:
        if name in held:  # most steps: none
            del held[name]
    held.update(host=host, step=step)


class CapturedStepMetadata(Reused, CommonAttentionMetadata):
    """The metadata that a graph was captured over: every later step of its size has it too."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes. Not kept: the arrays of ``host`` are another object the next time.
            return self._of_host(name)


class CapturedSteps:
    """The captured sizes and buffers that a state and its clones share."""

    def __init__(self) -> None:
        self.most = 0
        self.open_in: Callable[[], Any] = lambda: None
        """A weak reference to the generator of ``graph_capture``: ``most`` holds until that has ended."""
        self.held: GraphBuffers | None = None
        self.metadata: CapturedSizes[CommonAttentionMetadata] = CapturedSizes()
        """The metadata that each size was captured over."""
        self.prepared = NOTHING
        """The step that the buffers hold whole, and its ``advanced`` count when it was written there; an empty step is
        the metadata of its size.
        """

    @property
    def limit(self) -> int:
        """The largest size that can be captured now; 0 outside ``graph_capture``, however that was left."""
        return self.most if getattr(self.open_in(), "gi_frame", None) is not None else 0

    @property
    def buffers(self) -> GraphBuffers:
        """The allocated buffers; CaptureError before ``allocate``."""
        if self.held is None:
            raise CaptureError("graph_capture: no buffers yet; capture inside `with state.graph_capture(...)`")
        return self.held

    def allocate(self, settings: ListSettings, device: str | None, max_batch_size: int) -> None:
        """Allocates buffers for ``max_batch_size`` requests; CaptureError where graphs read smaller ones."""
        if self.held is not None and self.held.max_batch_size >= max_batch_size:
            return
        if self.metadata:
            raise CaptureError(
                f"graph_capture: {counted(max_batch_size, 'request')}, but the graphs captured so far read buffers of "
                f"{self.buffers.max_batch_size}; make a new state and capture anew"
            )
        self.held = GraphBuffers(settings, device, max_batch_size)

    def size_of(self, metadata: CommonAttentionMetadata, only: int | None) -> int:
        """The captured size that a step was padded to; ValueError or CaptureError where there is none."""
        if not getattr(metadata, "from_groups", False):
            raise ValueError("metadata: not of CommonMetadataBuilder; MetadataBuilder captures its own steps")
        if not metadata.use_cuda_graph:
            raise ValueError(
                "metadata: not padded for a graph; build it with cuda_graph_pad_size=state.pad_size(number of decodes)"
            )
        self.check_size(metadata.num_reqs, only)
        return metadata.num_reqs

    def check_size(self, num_reqs: int, only: int | None) -> None:
        """CaptureError unless ``num_reqs`` is a captured size."""
        if num_reqs not in self.metadata or only not in (None, num_reqs):
            self.metadata.refuse(
                f"metadata: padded to {counted(num_reqs, 'request')}, which",
                "build with cuda_graph_pad_size=state.pad_size(number of decodes), which is -1 where the step runs "
                "without a graph",
                only,
            )

    def check_counts(self, num_reqs: int, num_tokens: int, num_pages: int) -> None:
        """ValueError unless a step has only decodes of one token, and room for its pages."""
        if num_tokens != num_reqs:
            raise ValueError(
                f"metadata: {counted(num_tokens, 'token')} in {counted(num_reqs, 'row')}; graphs hold decodes of one "
                "token, so run the step without one"
            )
        if num_pages > self.buffers.max_pages:
            raise ValueError(
                f"metadata: {counted(num_pages, 'page')}, but the graphs have room for {self.buffers.max_pages}; run "
                "the step without a graph, or capture longer sequences (max_seq_len_to_capture)"
            )

    def check_fits(self, metadata: CommonAttentionMetadata, settings: ListSettings) -> None:
        """ValueError unless the buffers can hold a step of a captured size; another builder may have built it."""
        host, buffers = metadata.host, self.buffers
        if metadata.source is not None:
            for key in ("block_size", "sliding_window"):
                built, kept = getattr(metadata.source.builder, key), getattr(settings, key)
                if built != kept:
                    raise ValueError(
                        f"metadata: of a builder with {key} {built}, but the graphs have {kept}; build it with the "
                        "builder of this state"
                    )
        for name, held in (("paged_kv_indptr", buffers.has_pages), ("encoder_seq_lens", buffers.has_encoder)):
            if hasattr(host, name) != held:
                raise ValueError(
                    f"metadata: {'without' if held else 'with'} {name}, unlike the graphs; build it with the builder "
                    "of this state"
                )
        for name, width in (("block_table", buffers.width), ("cross_block_table", buffers.cross_width)):
            if width and getattr(host, name).shape[1] != width:
                raise ValueError(
                    f"metadata: a {name} {getattr(host, name).shape[1]} wide, but the graphs read {width}; build it "
                    "with the builder of this state"
                )
        if metadata.max_decode_seq_len > (settings.max_seq_len_to_capture or 0):
            raise ValueError(
                f"metadata: a length of {metadata.max_decode_seq_len} exceeds max_seq_len_to_capture "
                f"{settings.max_seq_len_to_capture}; run the step without a graph"
            )
        num_pages = len(host.paged_kv_indices) if buffers.has_pages else 0
        self.check_counts(metadata.num_reqs, metadata.num_tokens, num_pages)

    def new_metadata(self, settings: ListSettings, bucket: int) -> CommonAttentionMetadata:
        """Metadata of ``bucket`` decodes over the buffers, with the largest lengths; ``host`` is set later."""
        longest = settings.max_seq_len_to_capture
        metadata = CapturedStepMetadata(
            None,
            read_only if settings.backend is None else settings.backend.from_host,
            num_reqs=bucket,
            num_tokens=bucket,
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=bucket,
            num_decode_tokens=bucket,
            max_query_len=1,
            max_seq_len=longest,
            max_prefill_seq_len=0,
            max_decode_seq_len=longest,
            use_cuda_graph=True,
            max_decode_query_len=1,
            from_groups=True,
            **self.buffers.views(bucket),
        )
        if settings.encoder_decoder:
            longest = settings.max_encoder_seq_len_to_capture or metadata.max_seq_len
            vars(metadata).update(max_encoder_seq_len=longest, num_encoder_tokens=bucket * longest)
        # A backend reads the views inside a capture, where no arrays may be allocated: the decodes are the whole step.
        vars(metadata).update(_prefill=None, _decode=metadata)
        return metadata
