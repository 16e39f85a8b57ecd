"""Several KV-cache groups with the persistent builder: what a batch refuses, and that it changes nothing."""

import pytest
from builder.persistent.group_batches import CROSS, FULL, WINDOW, batch_of, cross_batch
from core_state import core_state

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder

BAD_GROUPS = [
    ([], "groups: none holds the decoder's own keys"),
    ([CROSS], "groups: none holds the decoder's own keys"),
    (5, "groups: 5 is not a list of KVCacheGroup"),
    (["full"], r"groups\[0\]: 'full' is not a KVCacheGroup"),
    ([FULL, FULL], r"groups\[1\].name: 'full' stands twice"),
    ([KVCacheGroup("", 4)], r"groups\[0\].name: '' is not a name"),
    ([FULL, KVCacheGroup("b", 0)], r"groups\[1\].block_size: 0 is below 1"),
    ([FULL, KVCacheGroup("b", 8, kernel_block_size=3)], r"groups\[1\].kernel_block_size: 3 does not divide .* 8"),
    ([FULL, KVCacheGroup("b", 8, kernel_block_size=0)], r"groups\[1\].kernel_block_size: 0 is below 1"),
    ([FULL, KVCacheGroup("b", 8, sliding_window=0)], r"groups\[1\].sliding_window: 0 is below 1"),
    ([FULL, KVCacheGroup("b", 8, num_blocks=0)], r"groups\[1\].num_blocks: 0 is below 1"),
    ([FULL, KVCacheGroup("b", 8, cross="no")], r"groups\[1\].cross: 'no' is not True or False"),
    ([FULL, CROSS._replace(sliding_window=4)], r"groups\[1\].sliding_window: given for a cross group"),
    ([FULL, CROSS, CROSS._replace(name="other")], "groups: 'encoder' and 'other' are both cross"),
    ([KVCacheGroup(str(i), 4) for i in range(65)], "groups: 65 given; a batch takes 64"),
    (
        [KVCacheGroup("a", 4, num_blocks=2**31 - 1), KVCacheGroup("b", 8, 4, num_blocks=2**30 + 1)],
        "num_blocks: 1073741825 of 2",
    ),
]


@pytest.mark.parametrize(("groups", "message"), BAD_GROUPS)
def test_bad_groups_name_themselves(kernels, groups, message):
    with pytest.raises((ValueError, TypeError), match=message):
        InputBatch(max_num_reqs=2, max_model_len=16, groups=groups, kernels=kernels)


BAD_BATCHES = [
    ({"groups": [FULL], "block_size": 4}, "block_size: 4 given beside groups"),
    ({"groups": [FULL], "num_blocks": 4}, "num_blocks: 4 given beside groups"),
    ({"groups": [FULL], "max_encoder_len": 4}, "max_encoder_len: 4 given, but no group is cross"),
    ({"groups": [FULL, CROSS]}, "max_encoder_len: missing; cross group"),
    ({"groups": [FULL, CROSS], "max_encoder_len": 0}, "max_encoder_len: 0 is below 1"),
    ({}, "block_size: missing; give it, or groups"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_BATCHES)
def test_batches_that_contradict_themselves(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        InputBatch(max_num_reqs=2, max_model_len=16, **arguments)


TWO = {"full": [7], "encoder": [8]}
BAD_CALLS = [
    (lambda b: b.add_request("z", {"full": [7]}), "block_ids: request 'z' has none for group 'encoder'"),
    (lambda b: b.add_request("z", [7]), r"block_ids: \[7\] of request 'z' is not a mapping; .*: full, encoder"),
    (lambda b: b.add_request("z", TWO | {"x": []}), "block_ids: request 'z' names group 'x'; known: full, encoder"),
    (lambda b: b.add_request("z", TWO), r"encoder_seq_len: 0 of request 'z', which has blocks in cross group 'encode"),
    (
        lambda b: b.add_request("z", TWO, encoder_seq_len=13),
        "encoder_seq_len: 13 of request 'z' exceed max_encoder_len",
    ),
    (lambda b: b.add_request("z", TWO, encoder_seq_len=-1), "encoder_seq_len: -1 is below 0"),
    (lambda b: b.add_request("z", TWO, encoder_seq_len=5), "'z' has 5 encoder tokens but holds 1 block .*; give it 2$"),
    (lambda b: b.add_request("z", {"full": [7], "encoder": [1] * 4}, encoder_seq_len=5), "4 block ids but room for 3"),
    (
        lambda b: b.add_request("z", TWO, 5, encoder_seq_len=1),
        "'z' has 5 computed tokens but holds 1 block .*; give it 2$",
    ),
    (lambda b: b.add_request("z", {"full": [7], "encoder": [-1]}, encoder_seq_len=1), "block id -1 at index 0"),
    (lambda b: b.append_blocks_many({"a": {"full": [7], "encoder": [True]}}), "'a': block id True at index 0"),
    (lambda b: b.append_blocks_many({"a": {"full": [7]}, "b": {"none": [7]}}), "'b' names group 'none'"),
    (lambda b: b.append_blocks_many({"a": {"full": [7]}, "b": [7]}), r"\[7\] of request 'b' is not a mapping"),
    (lambda b: b.replace_block("a", 0, 9), "group: name one of full, encoder"),
    (lambda b: b.replace_block("a", 0, 9, "none"), "group: 'none' is not one of full, encoder"),
    (lambda b: b.replace_block("a", 0, 9, ["full"]), r"group: \['full'\] is not one of"),
    (lambda b: b.replace_block("a", 2, 9, "full"), "index: 2, but request 'a' holds 2 blocks"),
    (lambda b: b.replace_block("a", 0, -1, "full"), "block_id: -1 is below 0"),
    (lambda b: b.replace_block("a", True, 1, "full"), "index: True is not an integer"),
    (lambda b: b.truncate_blocks("a", 1, "encoder"), r"1 is outside 2\.\.2 \(request 'a' has 5 cached encoder tokens"),
    (lambda b: b.truncate_blocks("a", 1), "group: name one of"),
    (lambda b: b.needs_block("none"), "group: 'none' is not one of"),
    (lambda b: b.release_passed_blocks(-1), "num_rollback: -1 is below 0"),
    (lambda b: b.rollback_many([("a", 1)]), "num_tokens: .* is not a mapping"),
    (lambda b: b.rollback_many({"b": 1, "a": 2}), "num_tokens: 2 goes past the start of request 'a'"),
    (lambda b: b.rollback_many({"b": 1, "q": 1}), "req_id: 'q' is not in the batch"),
    (lambda b: b.rollback_many({"b": 1, "a": 1.0}), "num_tokens: 1.0 is not an integer"),
    (lambda b: b.swap_rows(0, 2), "j: row 2 is not in use; num_rows is 2"),
    (lambda b: b.swap_rows(-1, 0), "i: -1 is below 0"),
]


class Lying(dict):
    """A mapping whose items are not what its other methods say."""

    said = ()

    def items(self):
        return self.said


def lying(said):
    ids = Lying(full=[7], encoder=[])
    ids.said = said
    return ids


BAD_CALLS += [
    (lambda b: b.add_request("z", lying([]), 17), "^block_ids: request 'z' has none for group 'full'"),
    (lambda b: b.append_blocks("a", lying([("none", [7])])), "^block_ids: request 'a' names group 'none'"),
    (lambda b: b.append_blocks("a", lying([3])), "^block_ids: of request 'a', its items are no names and ids"),
    (lambda b: b.append_blocks("a", lying([([], 3)])), r"^block_ids: request 'a' names group \[\]"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_a_refused_call_changes_nothing(kernels, call, message):
    batch = cross_batch(kernels)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    before = core_state(batch)
    with pytest.raises((ValueError, TypeError), match=message):
        call(batch)
    assert core_state(batch) == before
    assert metadata.paged_kv_indices.tolist() == [1, 5]  # nothing has moved


def test_encoders_need_a_cross_group(kernels):
    batch = batch_of(kernels, FULL, WINDOW)
    blocks = {"full": [1], "window": [2]}
    with pytest.raises(ValueError, match="encoder_seq_len: 3 of request 'a', but no group is cross"):
        batch.add_request("a", blocks, encoder_seq_len=3)
    with pytest.raises(ValueError, match="encoder_computed: true for request 'a', but no group is cross"):
        batch.add_request("a", blocks, encoder_computed=True)
    assert len(batch) == 0


def test_the_group_of_a_missing_block_is_named(kernels):
    batch = batch_of(kernels, FULL, KVCacheGroup("small", 8, kernel_block_size=2))
    batch.add_request("a", {"full": [1, 2, 3], "small": [4]}, 6)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    before = core_state(batch)
    message = r"row 0 \(request 'a'\) in group 'small' holds 1 block but needs 2 for its 9 tokens \(block_size 8\)"
    with pytest.raises(ValueError, match=message):
        builder.build({"a": 3})
    batch._core.tables["small"].put(0, 0, 0)  # which the batch's own methods refuse
    message = r"row 0 \(request 'a'\) in group 'small' would write token 6 to block 0"
    for scheduled in ({}, {"a": 2}):
        with pytest.raises(ValueError, match=message):
            builder.build(scheduled)
    batch.replace_block("a", 0, 4, "small")
    assert core_state(batch)[:-1] == before[:-1]
