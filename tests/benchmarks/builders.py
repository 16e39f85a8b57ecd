"""attncore's two builders over the shapes, ready to be timed: each function answers the callable."""

import shapes
from shapes import BLOCK_SIZE

from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
)
from attncore.builder.lists.capture_state import CommonAttentionState


def persistent(rows, max_tokens=8192, kernels=None):
    """The batch, its builder, and what build is called with: the rows that do not run one token."""
    longest = max(len(row.blocks) for row in rows) * BLOCK_SIZE
    batch = InputBatch(max_num_reqs=len(rows), max_model_len=longest, block_size=BLOCK_SIZE, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=max(max_tokens, len(rows)))
    for i, row in enumerate(rows):
        batch.add_request(i, row.blocks, row.computed)
    return batch, builder, {i: row.query_len for i, row in enumerate(rows) if row.query_len != 1}


def in_groups(rows, block_sizes):
    """A builder over one KV-cache group a block size."""
    groups = [KVCacheGroup(str(index), size) for index, size in enumerate(block_sizes)]
    longest = max(row.computed for row in rows) + shapes.STEPS + 1
    batch = InputBatch(max_num_reqs=len(rows), max_model_len=longest, groups=groups)
    for i, (row, blocks) in enumerate(zip(rows, shapes.in_groups(rows, block_sizes), strict=True)):
        batch.add_request(i, {group.name: ids for group, ids in zip(groups, blocks, strict=True)}, row.computed)
    return MetadataBuilder(batch, max_num_batched_tokens=8192)


def in_a_bucket(rows, size):
    """A builder that has captured a size, and one that has not, over the same batch each."""
    builders = []
    for _ in range(2):
        longest = max(len(row.blocks) for row in rows) * BLOCK_SIZE
        batch = InputBatch(max_num_reqs=size, max_model_len=longest, block_size=BLOCK_SIZE)
        for i, row in enumerate(rows):
            batch.add_request(i, row.blocks, row.computed)
        builders.append(MetadataBuilder(batch, max_num_batched_tokens=8192))
    builders[0].capture(size)
    return builders


def captured_lists(rows, layout):
    """A step of the list builder built where a captured graph reads it, and one that is not."""
    longest = max(len(row.blocks) for row in rows) * BLOCK_SIZE
    builder = CommonMetadataBuilder(BLOCK_SIZE, layout, chunked_prefill=True, max_seq_len_to_capture=longest)
    state, groups = CommonAttentionState(None, builder), groups_of(rows)
    with state.graph_capture(len(rows)):
        state.metadata_for_capture(len(rows))
    return (lambda: state.build(groups, 0)), (lambda: builder.build(groups, 0))


def bytes_written(metadata):
    """What a persistent build writes, bytes: every host field, the rectangle and the page indices apart."""
    host, n = metadata.host, metadata.num_reqs
    tokens = sum(getattr(host, name).nbytes for name in ("slot_mapping", "positions", "token_to_req_indices"))
    per_request = (
        "seq_lens", "context_lens", "query_lens", "logits_indices", "paged_kv_last_page_len",
        "query_start_loc", "seq_start_loc", "paged_kv_indptr",
    )  # fmt: skip
    views = 2 * n * 4  # two of the prefix sums once more, for the view of the prefills
    return tokens + sum(getattr(host, name)[:n].nbytes for name in per_request) + views


def groups_of(rows):
    """The rows as lists of first-generation groups, prompts first."""
    ordered = sorted(enumerate(rows), key=lambda item: item[1].query_len == 1)
    return [
        SequenceGroup(row.query_len > 1, [Sequence(i, row.query_len, row.computed, row.blocks)]) for i, row in ordered
    ]


def list_builder(rows, layout, kernels=None):
    builder = CommonMetadataBuilder(BLOCK_SIZE, layout, chunked_prefill=True, kernels=kernels)
    groups = groups_of(rows)
    return lambda: builder.build(groups)
