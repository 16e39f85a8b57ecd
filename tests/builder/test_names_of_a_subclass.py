"""Names that are of a subclass of str: each is converted once, at the door, and its own methods answer nothing."""

import pytest

from attncore.builder import CommonMetadataBuilder, InputBatch, KVCacheGroup, MetadataBuilder


class Liar(str):
    """Equal to every text, and found under none."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 99


@pytest.fixture
def batch(kernels):
    groups = [KVCacheGroup(Liar("full"), 4), KVCacheGroup(Liar("window"), 4, sliding_window=8)]
    return InputBatch(max_num_reqs=2, max_model_len=16, groups=groups, kernels=Liar(kernels))


def test_groups_are_found_by_their_plain_names(batch):
    assert [type(group.name) for group in batch.groups] == [str, str]
    batch.add_request("a", {Liar("window"): [3], "full": [1]}, 3)
    assert batch.block_ids("a") == {"full": [1], "window": [3]}
    assert batch.replace_block("a", 0, 5, group=Liar("window")) == 3
    assert sorted(MetadataBuilder(batch, max_num_batched_tokens=8).build().groups) == ["full", "window"]


def test_a_name_is_what_its_text_says(batch):
    with pytest.raises(ValueError, match="block_ids: request 'a' names group 'other'"):
        batch.add_request("a", {"full": [1], Liar("other"): [2]})
    with pytest.raises(ValueError, match="group: 'other' is not one of full, window"):
        batch.needs_block(Liar("other"))
    with pytest.raises(ValueError, match="transport: 'other' is not one of auto, graph, copy"):
        MetadataBuilder(batch, max_num_batched_tokens=8, transport=Liar("other"))
    with pytest.raises(ValueError, match="layout: 'other' is not one of common, "):
        CommonMetadataBuilder(4, Liar("other"))
    with pytest.raises(ValueError, match="kernels: 'other' is not one of cython, numba"):
        InputBatch(max_num_reqs=2, max_model_len=16, block_size=4, kernels=Liar("other"))
    with pytest.raises(ValueError, match="per: 'other' is neither token nor request"):
        MetadataBuilder(batch, max_num_batched_tokens=8).register_field("x", "i8", Liar("other"), lambda *_: None)


def test_two_groups_of_one_name_are_refused_whatever_their_hashes():
    with pytest.raises(ValueError, match=r"groups\[1\].name: 'full' stands twice"):
        InputBatch(max_num_reqs=2, max_model_len=16, groups=[KVCacheGroup(Liar("full"), 4), KVCacheGroup("full", 4)])
