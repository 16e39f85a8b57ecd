"""The two builders of metadata, and building blocks for engines that do more with a step.

``fields`` declares the fields, ``metadata`` has them as attributes of a step, ``slices`` and ``device_slices`` make
views of a step. ``persistent`` builds steps from a batch that is kept from step to step and sends them to a device by
``device``; ``lists`` builds a step from groups of sequences. ``blocks`` is host arithmetic on metadata and its arrays
(docs/building-blocks.md).
"""

from attncore.builder.blocks.cascade import (
    Cascade,
    CascadePass,
    CascadeRule,
    SharedPrefix,
    count_common_blocks,
    find_shared_prefix,
    plan_cascade,
)
from attncore.builder.blocks.chunked_context import (
    ContextChunks,
    context_chunk_metadata,
    context_chunks,
    new_tokens_metadata,
)
from attncore.builder.blocks.context_parallel import ContextParallel
from attncore.builder.blocks.kernel_blocks import expand_blocks, kernel_blocks_per_block
from attncore.builder.blocks.local_attention import VirtualBatch, local_attention_batches, local_attention_metadata
from attncore.builder.blocks.microbatches import BatchSlice, slice_by_requests, slice_by_tokens, slice_metadata
from attncore.builder.blocks.placeholder_map import Placeholder, PlaceholderMap, PlaceholderRun, placeholder_map
from attncore.builder.blocks.splitting import (
    DecodePrefillSplit,
    ThreeWaySplit,
    classify_requests,
    plan_reorder,
    reorder_batch,
    rows_after,
    split_decodes_and_prefills,
    split_three_ways,
)
from attncore.builder.blocks.state_chunks import StateChunks, state_chunks
from attncore.builder.lists.advance_step import advance_step
from attncore.builder.lists.attention_arguments import (
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
)
from attncore.builder.lists.builder import CommonMetadataBuilder
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.builder.lists.encoders import token_counts
from attncore.builder.lists.sequence_group import Sequence, SequenceGroup
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.persistent.builder import MetadataBuilder
from attncore.builder.persistent.input_batch import InputBatch
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.builder.persistent.state_group import StateGroup
from attncore.builder.received_metadata import metadata_from_fields

__all__ = [
    "BatchSlice",
    "Cascade",
    "CascadePass",
    "CascadeRule",
    "CommonAttentionMetadata",
    "CommonAttentionState",
    "CommonMetadataBuilder",
    "ContextChunks",
    "ContextParallel",
    "DecodePrefillSplit",
    "InputBatch",
    "KVCacheGroup",
    "MetadataBuilder",
    "Placeholder",
    "PlaceholderMap",
    "PlaceholderRun",
    "Sequence",
    "SequenceGroup",
    "SharedPrefix",
    "StateChunks",
    "StateGroup",
    "ThreeWaySplit",
    "VirtualBatch",
    "advance_step",
    "classify_requests",
    "context_chunk_metadata",
    "context_chunks",
    "count_common_blocks",
    "expand_blocks",
    "find_shared_prefix",
    "get_seq_len_block_table_args",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
    "kernel_blocks_per_block",
    "local_attention_batches",
    "local_attention_metadata",
    "metadata_from_fields",
    "new_tokens_metadata",
    "placeholder_map",
    "plan_cascade",
    "plan_reorder",
    "reorder_batch",
    "rows_after",
    "slice_by_requests",
    "slice_by_tokens",
    "slice_metadata",
    "split_decodes_and_prefills",
    "split_three_ways",
    "state_chunks",
    "token_counts",
]
