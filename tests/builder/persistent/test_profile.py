"""A profiling run of the persistent builder: a model runs before the cache exists."""

import itertools

import pytest
import torch

from attncore import BackendConfig, InputBatch, KVCacheGroup, MetadataBuilder, dense
from attncore.reference import ReferenceBackend


@pytest.fixture
def batch(kernels):
    return InputBatch(max_num_reqs=3, max_model_len=64, block_size=4, kernels=kernels)


def test_a_model_runs_without_a_cache(batch):
    backend = ReferenceBackend(BackendConfig(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32", block_size=4))
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16)
    metadata = builder.build_profile([7, 1, 5])
    assert metadata.slot_mapping.tolist() == [-1] * 13
    assert metadata.seq_lens.tolist() == [7, 1, 5]
    assert metadata.positions.tolist() == [*range(7), 0, *range(5)]
    assert metadata.logits_indices.tolist() == [6, 7, 12]
    query, key, value = torch.randn(13, 2, 8), torch.randn(13, 1, 8), torch.randn(13, 1, 8)
    out = backend.impl("layer", scale=0.3).forward(query, key, value, None, metadata)
    for start, stop in ((0, 7), (7, 8), (8, 13)):
        expected = dense.dense_attention(query[start:stop], key[start:stop], value[start:stop], scale=0.3)
        assert torch.allclose(out[start:stop], expected, atol=1e-5)
    batch.add_request("a", [1], 2)  # the batch knows nothing of it
    assert builder.build().seq_lens.tolist() == [3]


@pytest.mark.parametrize(
    ("query_lens", "message"),
    [
        ([1, 1, 1, 1], "query_lens: 4 requests exceed max_num_reqs 3"),
        (itertools.repeat(1), "query_lens: 4 requests exceed max_num_reqs 3"),
        ([9, 8], "query_lens: 17 tokens exceed max_num_batched_tokens 16"),
        ([3, 0], "query_len"),
        ([], "query_lens: empty"),
    ],
)
def test_what_does_not_fit_is_refused(batch, query_lens, message):
    with pytest.raises(ValueError, match=message):
        MetadataBuilder(batch, max_num_batched_tokens=16).build_profile(query_lens)


class Planning(ReferenceBackend):
    """Keeps the steps that it plans."""

    name = "planning"

    def plan(self, metadata):
        metadata.kept.setdefault("planned", []).append(self)
        assert metadata.host.paged_kv_indptr.tolist() == [0] * (metadata.num_reqs + 1)


def test_the_backend_of_each_group_plans_it_and_finds_empty_page_lists(kernels):
    config = BackendConfig(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32", block_size=4)
    plain, *planning = ReferenceBackend(config), Planning(config), Planning(config)
    groups = [KVCacheGroup(name, 4) for name in "abc"]
    batch = InputBatch(max_num_reqs=3, max_model_len=64, groups=groups, kernels=kernels)
    backends = dict(zip("abc", (plain, *planning), strict=True))
    metadata = MetadataBuilder(batch, backends, max_num_batched_tokens=16).build_profile([7, 1])
    assert metadata.kept["planned"] == planning
    assert metadata.paged_kv_indices.tolist() == []
