"""What a caller gives is quoted in short: errors of public calls have few letters, on one line."""

import numpy as np
import pytest
import torch

import attncore
from attncore import slots
from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    StateGroup,
    metadata_from_fields,
    placeholder_map,
    rows_after,
    slice_metadata,
)

MOST = 1300
MANY, NAME = list(range(10**5)), "n" * 10**5


class Loud:
    def __repr__(self):
        return "\x1b[31mred\n" * 10**4


class Refuses:
    TEXT = "\x1b[31mred\n" * 10**4

    def __hash__(self):
        raise TypeError(self.TEXT)

    def __iter__(self):
        raise TypeError(self.TEXT)


WIDE = [np.broadcast_to(np.int32(1), (2,) * 24), torch.ones(1, dtype=torch.int32).expand((2,) * 24)]
"""Some bytes, of which a library prints millions of numbers."""
VALUES = [MANY, NAME, Loud(), Refuses(), {NAME: 1}, {Loud(): MANY}, *WIDE, [WIDE[0]], 10**5000]


def batch_with(req_id):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, spans=True)
    batch.add_request(req_id, [1])
    builder = MetadataBuilder(batch, max_num_batched_tokens=64, decode_threshold=3, draft_trees=True)
    return batch, builder


CALLS = {
    "append_blocks_many": lambda given: batch_with("a")[0].append_blocks_many(given),
    "append_blocks": lambda given: batch_with("a")[0].append_blocks("a", given),
    "append_blocks of": lambda given: batch_with("a")[0].append_blocks(given, [1]),
    "add_request": lambda given: batch_with("a")[0].add_request("b", given),
    "add_request named": lambda given: batch_with("a")[0].add_request(given, [2], 99),
    "rollback_many": lambda given: batch_with("a")[0].rollback_many(given),
    "rollback": lambda given: batch_with("a")[0].rollback("a", given),
    "replace_block": lambda given: batch_with("a")[0].replace_block("a", 0, given),
    "truncate_blocks": lambda given: batch_with("a")[0].truncate_blocks("a", given),
    "set_spans": lambda given: batch_with("a")[0].set_spans("a", given),
    "column": lambda given: batch_with("a")[0].column(given, "int32"),
    "column of": lambda given: batch_with("a")[0].column("x", given),
    "needs_block": lambda given: batch_with("a")[0].needs_block(given),
    "num_computed_tokens": lambda given: batch_with("a")[0].num_computed_tokens(given),
    "build": lambda given: batch_with("a")[1].build(given),
    "build of": lambda given: batch_with("a")[1].build({"a": given}),
    "build named": lambda given: batch_with("a")[1].build({given: 1}),
    "bucket": lambda given: batch_with("a")[1].build({"a": 1}, bucket=given),
    "trees": lambda given: batch_with("a")[1].build(trees=given),
    "parents": lambda given: batch_with("a")[1].build(trees={"a": given}),
    "keep_paths": lambda given: batch_with("a")[1].keep_paths(given),
    "path": lambda given: batch_with("a")[1].keep_paths({"a": given}),
    "register_field": lambda given: batch_with("a")[1].register_field("x", "int32", "token", given),
    "register_field named": lambda given: batch_with("a")[1].register_field(given, "int32", "token", len),
    "register_column": lambda given: batch_with("a")[1].register_column(given),
    "groups": lambda given: InputBatch(max_num_reqs=1, max_model_len=1, groups=given),
    "group": lambda given: InputBatch(max_num_reqs=1, max_model_len=1, groups=[given]),
    "group name": lambda given: InputBatch(max_num_reqs=1, max_model_len=1, groups=[KVCacheGroup(given, 1)]),
    "state name": lambda given: InputBatch(
        max_num_reqs=1, max_model_len=1, groups=[KVCacheGroup("a", 1), StateGroup(given)]
    ),
    "max_num_reqs": lambda given: InputBatch(max_num_reqs=given, max_model_len=1, block_size=1),
    "builder's batch": lambda given: MetadataBuilder(given, max_num_batched_tokens=1),
    "backend": lambda given: MetadataBuilder(batch_with("a")[0], given, max_num_batched_tokens=1),
    "context_parallel": lambda given: MetadataBuilder(
        batch_with("a")[0], max_num_batched_tokens=1, context_parallel=given
    ),
    "list builder": lambda given: CommonMetadataBuilder(4).build(given),
    "sequences": lambda given: CommonMetadataBuilder(4).build([SequenceGroup(True, given)]),
    "seq_id": lambda given: CommonMetadataBuilder(4).build([SequenceGroup(True, [Sequence(given, 5, 0, [1])])]),
    "block_table": lambda given: CommonMetadataBuilder(4).build([SequenceGroup(True, [Sequence(1, 5, 0, given)])]),
    "is_prompt": lambda given: CommonMetadataBuilder(4).build([SequenceGroup(given, [Sequence(1, 5, 0, [1])])]),
    "layout": lambda given: CommonMetadataBuilder(4, given),
    "pad_block_table": lambda given: slots.pad_block_table(given),
    "pad_block_table's row": lambda given: slots.pad_block_table([given]),
    "fields": lambda given: metadata_from_fields(given),
    "field": lambda given: metadata_from_fields({"seq_lens": given}),
    "rows_after": lambda given: rows_after(given, 3),
    "placeholders": lambda given: placeholder_map(given, [1], [1]),
    "placeholder": lambda given: placeholder_map([[given]], [1], [1]),
    "slice": lambda given: slice_metadata(given, given),
    "select": lambda given: attncore.select(given),
    "dtype": lambda given: attncore.select(num_heads=1, num_kv_heads=1, head_size=8, dtype=given),
    "num_heads": lambda given: attncore.select(num_heads=given, num_kv_heads=1, head_size=8, dtype="float32"),
    "features": lambda given: attncore.select(
        num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", features=given
    ),
    "config": lambda given: attncore.BackendConfig(given, 1, 8, "float32", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_errors_quote_the_beginning_of_what_is_given(name):
    for given in VALUES:
        try:
            CALLS[name](given)
        except Exception as error:
            text = str(error)
            if text == Refuses.TEXT:  # the caller's own error, as it is
                continue
            assert len(text) <= MOST, (type(given), len(text), text[:100])
            assert text.isprintable(), (type(given), text[:100])


NAMED = {
    "add_request": lambda batch, builder, name: batch.add_request(name, [1]),
    "rollback": lambda batch, builder, name: batch.rollback(name, 5),
    "truncate_blocks": lambda batch, builder, name: batch.truncate_blocks(name, 9),
    "replace_block": lambda batch, builder, name: batch.replace_block(name, 9, 3),
    "set_spans": lambda batch, builder, name: batch.set_spans(name, [(5, 3)]),
    "append_blocks": lambda batch, builder, name: batch.append_blocks(name, [-1]),
    "build": lambda batch, builder, name: builder.build({name: 9}),
    "trees": lambda batch, builder, name: builder.build(trees={name: [5]}),
    "many drafts": lambda batch, builder, name: builder.build(trees={name: MANY}),
    "paths": lambda batch, builder, name: builder.keep_paths({name: [1]}),
}  # fmt: skip


@pytest.mark.parametrize("call", NAMED)
def test_errors_quote_the_beginning_of_a_request_s_name(call):
    batch, builder = batch_with(NAME)
    with pytest.raises(ValueError, match="nnnn") as caught:
        NAMED[call](batch, builder, NAME)
    assert len(str(caught.value)) <= MOST
