"""attncore's two doors over the shapes, ready to be timed: each function answers the callable."""

from shapes import BLOCK_SIZE

from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup


def persistent(rows, max_tokens=8192):
    """The batch, its builder, and what build is called with: the rows that do not run one token."""
    longest = max(len(row.blocks) for row in rows) * BLOCK_SIZE
    batch = InputBatch(max_num_reqs=len(rows), max_model_len=longest, block_size=BLOCK_SIZE)
    builder = MetadataBuilder(batch, max_num_batched_tokens=max(max_tokens, len(rows)))
    for i, row in enumerate(rows):
        batch.add_request(i, row.blocks, row.computed)
    return batch, builder, {i: row.query_len for i, row in enumerate(rows) if row.query_len != 1}


def bytes_written(metadata):
    """What a persistent build writes, bytes: every host field, the rectangle and the page indices apart."""
    arena, n = metadata._fields, metadata.num_reqs
    per_token = ("slot_mapping", "positions", "token_to_req_indices")
    tokens = sum(arena[name][: metadata.num_tokens].nbytes for name in per_token)
    return tokens + sum(arena[name][:n].nbytes for name in arena if name not in per_token)


def groups_of(rows):
    """The rows as lists of first-generation groups, prompts first."""
    ordered = sorted(enumerate(rows), key=lambda item: item[1].query_len == 1)
    return [
        SequenceGroup(row.query_len > 1, [Sequence(i, row.query_len, row.computed, row.blocks)]) for i, row in ordered
    ]


def list_door(rows, layout, kernels=None):
    builder = CommonMetadataBuilder(BLOCK_SIZE, layout, chunked_prefill=True, kernels=kernels)
    groups = groups_of(rows)
    return lambda: builder.build(groups)
