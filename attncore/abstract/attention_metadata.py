"""What a backend reads of a step, as protocols. ``attncore.CommonAttentionMetadata`` is what the builders make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attncore.step_arrays import StepArrays

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from attncore.builder import InputBatch
    from attncore.builder.metadata import Source

    Int32s = npt.NDArray[np.int32]
    Int64s = npt.NDArray[np.int64]


class HostArrays(StepArrays["Int64s", "Int32s"], Protocol):
    """A step's arrays on the host, NumPy."""


class StepBuilder(Protocol):
    """What a backend asks of the persistent builder, or the AdoptedSteps, whose step it plans or runs. They hash by
    identity.
    """

    @property
    def batch(self) -> InputBatch:
        """The batch that it builds steps of; ``batch.groups`` says how many blocks a KV-cache group has."""

    def host_lengths(self, metadata: Any) -> str:
        """``exact``; ``bounded`` for a step whose lengths on the host are upper bounds; ``none`` where it has none."""


class AttentionMetadata(StepArrays["Tensor", "Tensor"], Protocol):
    """What ``plan`` and ``forward`` may read of a step: T tokens of n requests, padded ones included.

    Tensors lie on the backend's device; ``host`` has them as NumPy arrays. In ``plan`` nothing on the device may be
    read, for the step has not been sent yet.
    """

    host: HostArrays
    """The arrays on the host. It knows lengths exactly unless ``host_lengths`` says otherwise."""
    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    max_query_len: int
    max_seq_len: int
    max_prefill_seq_len: int
    max_decode_seq_len: int
    max_decode_query_len: int
    """1 where there is no decode."""
    num_encoder_tokens: int
    max_encoder_seq_len: int
    use_cuda_graph: bool
    """Whether the step is padded to a captured size."""
    decodes_first: bool
    """The order of rows: decodes before prefills (persistent builder), or after them (list builder)."""
    from_groups: bool
    """Whether the list builder made it: windowed lengths are capped, plain prompts have no table."""
    req_ids: tuple[Any, ...]
    """The requests, in the order of rows (persistent builder)."""
    step: int
    """The step's number, ascending with each build (persistent builder); 0 elsewhere."""
    group: str
    """The name of the KV-cache group whose slots and table these are (persistent builder)."""
    source: Source | None
    """The list builder and the groups that it made the step from; None for views, captured sizes, and elsewhere."""

    @property
    def builder(self) -> StepBuilder | None:
        """The persistent builder whose step this is; None elsewhere. It tells builders apart."""

    @property
    def page_buffer(self) -> Tensor | None:
        """int32 on the device: all that page indices are ever written to by ``builder``, one tensor for all steps."""

    @property
    def kept(self) -> dict[Any, Any]:
        """A place for what a backend makes for this step, by keys of its own; empty again when the next step comes."""

    @property
    def of_rank(self) -> bool:
        """Whether slots and lengths are those of one rank of several (decode context parallelism)."""

    @property
    def host_lengths(self) -> str:
        """``exact``; ``bounded`` where lengths on the host are upper bounds of the device's, as of a step that was
        built overlapped; ``none`` where the host has none. A view says what its step says.
        """

    @property
    def prefill_metadata(self) -> AttentionMetadata | None:
        """The prefills of this step as a batch of their own; None where there are none."""

    @property
    def decode_metadata(self) -> AttentionMetadata | None:
        """The decodes of this step as a batch of their own; None where there are none."""


class AttentionMetadataBuilder(Protocol):
    """What makes a step's metadata: ``attncore.MetadataBuilder``, or ``attncore.CommonMetadataBuilder`` for lists."""

    def build(self, *args: Any, **kwargs: Any) -> AttentionMetadata:
        """The metadata of one step. Called by the engine, once a step."""
