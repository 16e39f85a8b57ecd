"""A call that would write to a tensor which cannot be written to is refused, and changes nothing."""

import pytest
import torch

from attncore import CacheWriter, InputBatch, MetadataBuilder, select
from attncore.ops import not_by_address
from attncore.reference import cache


def _leaf(*shape):
    return torch.zeros(shape, requires_grad=True)


def _in_inference(*shape):
    with torch.inference_mode():
        return torch.zeros(shape)


UNWRITABLE = {
    "expanded": (lambda *shape: torch.zeros(1).expand(shape), "share memory|contiguous"),
    "overlapping": (lambda *shape: torch.zeros(600).as_strided(shape, (1,) * len(shape)), "share memory"),
    "inference": (_in_inference, "inference_mode"),
    "a gradient": (_leaf, "requires a gradient"),
    "a view of one": (lambda *shape: _leaf(2, *shape)[1], "requires a gradient"),
    "sparse": (lambda *shape: torch.zeros(shape).to_sparse(), "layout"),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_what_cannot_be_written_to_is_refused_before_anything_is_written(kind):
    make, said = UNWRITABLE[kind]
    keys, values = torch.arange(3 * 4 * 2 * 8.0).view(3, 4, 2, 8), make(3, 4, 2, 8)
    before = keys.clone()
    calls = {
        "kv_caches": lambda: cache.copy_blocks([(keys, values)], [(0, 1)]),
        "target": lambda: cache.swap_blocks((keys, torch.zeros(3, 4, 2, 8)), (keys, values), [(0, 1)]),
    }
    if kind not in ("a gradient", "a view of one"):  # written to without one
        new, slots = torch.ones(1, 2, 8), torch.tensor([5])
        calls["kv_cache"] = lambda: cache.write(new, new, (keys, values), slots)
        calls["value_cache"] = lambda: CacheWriter()(new, new, keys, values, slots)
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: .*{said}"):
            call()
        assert torch.equal(keys, before)


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_an_output_that_cannot_be_written_to_leaves_the_cache_as_it_was(kind):
    make, said = UNWRITABLE[kind]
    backend = select(backend="reference", num_heads=2, num_kv_heads=2, head_size=8, dtype="float32").create()
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build()
    kv_cache, new = backend.allocate_kv_cache(3), torch.ones(1, 2, 8)
    layer = backend.impl("layer", scale=1.0)
    with pytest.raises(ValueError, match=f"^output: .*{said}"):
        layer.forward(new, new, new, kv_cache, metadata, make(1, 2, 8))
    with pytest.raises(ValueError, match=r"^query: of layout torch.sparse_coo"):
        layer.forward(new.to_sparse(), new, new, kv_cache, metadata)
    assert not kv_cache.any()


def test_a_slot_beyond_the_cache_names_the_cache():
    backend = select(backend="reference", num_heads=2, num_kv_heads=2, head_size=8, dtype="float32").create()
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
    batch.add_request("a", [7])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build()
    new = torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match=r"^kv_cache: 3 blocks found; slot_mapping has a slot in block 7"):
        backend.impl("layer", scale=1.0).forward(new, new, new, backend.allocate_kv_cache(3), metadata)


def test_pairs_that_are_no_pairs_are_named():
    with pytest.raises(ValueError, match=r"^block_pairs: list cannot be read as an array"):
        cache.copy_blocks(torch.zeros(2, 3, 4, 2, 8), [(0,), (1, 2)])


@pytest.mark.parametrize("tensor", [None, 5, [1.0], torch.zeros(2).numpy()])
def test_what_is_no_tensor_is_not_asked_where_it_lies(tensor):
    with pytest.raises(TypeError, match=r"^tensor: \w+ found; give a torch tensor"):
        not_by_address(tensor)
