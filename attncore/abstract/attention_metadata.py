"""What a backend reads of a step, as protocols. ``attncore.CommonAttentionMetadata`` is what the builders make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from attncore.builder import InputBatch
    from attncore.builder.metadata import Source

    Int32s = npt.NDArray[np.int32]
    Int64s = npt.NDArray[np.int64]


class HostArrays(Protocol):
    """A step's arrays on the host, NumPy. Each is described, under the same name, in ``AttentionMetadata``.

    What the builder does not make in this step is an AttributeError.
    """

    slot_mapping: Int64s
    positions: Int64s
    token_to_req_indices: Int32s
    seq_lens: Int32s
    context_lens: Int32s
    query_lens: Int32s
    logits_indices: Int32s
    query_start_loc: Int32s
    seq_start_loc: Int32s
    block_table: Int32s
    paged_kv_indptr: Int32s
    paged_kv_indices: Int32s
    paged_kv_last_page_len: Int32s
    encoder_seq_lens: Int32s
    encoder_query_lens: Int32s
    encoder_seq_start_loc: Int32s
    encoder_query_start_loc: Int32s
    cross_slot_mapping: Int64s
    cross_block_table: Int32s


class StepBuilder(Protocol):
    """What a backend asks of the persistent builder whose step it plans or runs. Builders hash by identity."""

    @property
    def batch(self) -> InputBatch:
        """The batch that it builds steps of; ``batch.groups`` says how many blocks a KV-cache group has."""

    def host_lengths(self, metadata: Any) -> str:
        """``exact``, or ``bounded`` for a step built overlapped, whose lengths on the host are upper bounds."""


class AttentionMetadata(Protocol):
    """What ``plan`` and ``forward`` may read of a step: T tokens of n requests, padded ones included.

    Tensors lie on the backend's device; ``host`` has them as NumPy arrays. In ``plan`` nothing on the device may be
    read, for the step has not been sent yet.
    """

    host: HostArrays
    """The arrays on the host. The host knows lengths exactly unless the step was built overlapped
    (``builder.host_lengths``).
    """
    # one a token
    slot_mapping: Tensor
    """int64[T]: where the token's key and value go: block * block_size + offset; -1: nowhere."""
    positions: Tensor
    """int64[T]: the token's index in its request."""
    token_to_req_indices: Tensor
    """int32[T]: the token's row."""
    # one a request
    seq_lens: Tensor
    """int32[n]: keys of the request: context and query."""
    context_lens: Tensor
    """int32[n]: tokens that were in the cache before this step."""
    query_lens: Tensor
    """int32[n]: tokens of this step."""
    query_start_loc: Tensor
    """int32[n + 1]: where the request's tokens start among the T."""
    seq_start_loc: Tensor
    """int32[n + 1]: prefix sums of seq_lens."""
    block_table: Tensor
    """int32[n, width], padded with 0: the blocks of the request's keys."""
    paged_kv_indptr: Tensor
    """int32[n + 1]: where the request's pages start in paged_kv_indices."""
    paged_kv_last_page_len: Tensor
    """int32[n]: tokens in the request's last page; 0 for an empty request."""
    # encoders and cross attention, in steps with encoder input: E encoder tokens run in this step, row after row
    encoder_seq_lens: Tensor
    """int32[n]: encoder tokens of the request; 0: it has no encoder input."""
    encoder_query_lens: Tensor
    """int32[n]: encoder tokens that run in this step."""
    encoder_seq_start_loc: Tensor
    """int32[n + 1]: prefix sums of encoder_seq_lens."""
    encoder_query_start_loc: Tensor
    """int32[n + 1]: where the request's encoder tokens start among the E."""
    cross_slot_mapping: Tensor
    """int64[E]: where the encoder token's key and value go in the cross cache; -1: nowhere."""
    cross_block_table: Tensor
    """int32[n, width], padded with 0: the blocks of the request's encoder tokens."""

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
    def paged_kv_indices(self) -> Tensor:
        """int32[paged_kv_indptr[-1]]: the block ids of every request in turn."""

    @property
    def page_buffer(self) -> Tensor | None:
        """int32 on the device: all that page indices are ever written to by ``builder``, one tensor for all steps."""

    @property
    def kept(self) -> dict[Any, Any]:
        """A place for what a backend makes for this step, by keys of its own; empty again when the next step comes."""

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
