"""The two doors: a persistent batch built step by step, and groups of sequences handed over one step at a time.

Beside them the building blocks for engines that do more with a step: host arithmetic, described in
docs/building-blocks.md.
"""

from attncore.builder.broadcast import metadata_from_fields
from attncore.builder.builder import MetadataBuilder
from attncore.builder.cascade import (
    Cascade,
    CascadePass,
    CascadeRule,
    SharedPrefix,
    count_common_blocks,
    find_shared_prefix,
    plan_cascade,
)
from attncore.builder.chunked_context import (
    ContextChunks,
    context_chunk_metadata,
    context_chunks,
    new_tokens_metadata,
)
from attncore.builder.common import CommonMetadataBuilder
from attncore.builder.context_parallel import ContextParallel
from attncore.builder.cross_attention import token_counts
from attncore.builder.input_batch import InputBatch
from attncore.builder.kernel_blocks import expand_blocks, kernel_blocks_per_block
from attncore.builder.kv_cache_group import KVCacheGroup
from attncore.builder.local_attention import VirtualBatch, local_attention_batches, local_attention_metadata
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.microbatches import BatchSlice, slice_by_requests, slice_by_tokens, slice_metadata
from attncore.builder.multimodal import Placeholder, PlaceholderMap, PlaceholderRun, placeholder_map
from attncore.builder.sequence_group import Sequence, SequenceGroup
from attncore.builder.speculative import advance_step
from attncore.builder.splitting import (
    DecodePrefillSplit,
    ThreeWaySplit,
    classify_requests,
    plan_reorder,
    reorder_batch,
    rows_after,
    split_decodes_and_prefills,
    split_three_ways,
)
from attncore.builder.state import CommonAttentionState

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
    "ThreeWaySplit",
    "VirtualBatch",
    "advance_step",
    "classify_requests",
    "context_chunk_metadata",
    "context_chunks",
    "count_common_blocks",
    "expand_blocks",
    "find_shared_prefix",
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
    "token_counts",
]
