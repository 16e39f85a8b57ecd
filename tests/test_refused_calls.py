"""A call of a backend or of a layer that is refused names the argument, and has written nothing."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builder.plain_backend import Least, config

from attncore import InputBatch, MetadataBuilder, select

SIZES = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}


def step(blocks, length=1):
    backend = select(backend="reference", **SIZES).create()
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
    batch.add_request("a", blocks, length - 1)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build()
    return backend, backend.impl("layer", scale=1.0), metadata


def test_a_slot_beyond_the_smaller_cache_of_a_pair():
    _, layer, metadata = step([7])
    keys, values, new = torch.zeros(64, 16, 2, 8), torch.zeros(2, 16, 2, 8), torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match=r"^kv_cache: 2 blocks found; slot_mapping has a slot in block 7"):
        layer.forward(new, new, new, (keys, values), metadata)
    assert not keys.any()


@pytest.mark.parametrize("block", [9999, -5])
@pytest.mark.parametrize("queries", [1, 20])
def test_a_block_beyond_the_cache_is_refused_before_anything_is_written(block, queries):
    backend = select(backend="reference", **SIZES).create()
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
    batch.add_request("a", [1, 2, 3], 17)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=32).build({"a": queries})
    table = np.array(metadata.host.block_table)
    table[0, 0] = block
    metadata = copy.copy(metadata)
    metadata.block_table = torch.from_numpy(table)
    kv_cache, new = backend.allocate_kv_cache(8), torch.ones(queries, 2, 8)
    with pytest.raises(ValueError, match=f"^metadata: the block table names block {block}, .* holds 8 blocks"):
        backend.impl("layer", scale=1.0).forward(new, new, new, kv_cache, metadata)
    assert not kv_cache.any()
    windowed = backend.impl("windowed", scale=1.0, sliding_window=2)  # which does not read that block
    windowed.forward(new, new, new, kv_cache, metadata)


def test_a_query_of_too_few_tokens_or_none_is_named():
    backend = select(backend="reference", **SIZES).create()
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build({"a": 5})
    layer, cache, query = backend.impl("layer", scale=1.0), backend.allocate_kv_cache(3), torch.ones(5, 2, 8)
    for call in (layer.forward, layer.forward_with_lse):
        for given, found in (
            (query[:3], r"shape \(3, 2, 8\)"),
            (query.flatten(1), r"shape \(5, 16\)"),
            (None, "None"),
            (query.numpy(), "ndarray"),
        ):
            told = (
                rf"^query: {found} found; the metadata has 5 tokens; give a tensor \(tokens, query heads, head size\)$"
            )
            for write, (key, value) in itertools.product((True, False), ((query, query), (None, None))):
                with pytest.raises(ValueError, match=told):
                    call(given, key, value, cache, metadata, write=write)
        with pytest.raises(ValueError, match=r"^key: ndarray found; attention of type decoder needs a tensor of shape"):
            call(query, query.numpy(), query, cache, metadata)
        with pytest.raises(TypeError, match=r"^metadata: NoneType found"):
            call(query, query, query, cache, None)
    with pytest.raises(ValueError, match=r"^query: shape"):
        layer.forward(query[:3], None, None, cache, metadata, write=False)


@pytest.mark.parametrize("wrong", [5, (None, None), "ab", (torch.zeros(3, 16, 2, 8), None)], ids=str)
def test_what_is_no_cache_is_named(wrong):
    backend, layer, metadata = step([1])
    new = torch.ones(1, 2, 8)
    for call in (layer.forward, layer.forward_with_lse):
        with pytest.raises(ValueError, match=r"^kv_cache: .* found; give a tensor, or a pair of them"):
            call(new, new, new, wrong, metadata)
    with pytest.raises(ValueError, match=r"^kv_cache: .* found; give a tensor, or a pair of them"):
        layer.write_cache(new, new, wrong, metadata)
    with pytest.raises(ValueError, match=r"^kv_caches: "):
        backend.copy_blocks([wrong], [(0, 1)])


def test_metadata_that_is_none_or_has_none_of_a_field():
    backend, _, metadata = step([1])
    with pytest.raises(TypeError, match=r"^metadata: NoneType found"):
        backend.check_metadata(None)
    backend.check_metadata(metadata)
    needs = [name for name in backend.spec.device_needs | backend.spec.host_needs if hasattr(metadata.host, name)]
    for name in needs:
        fields = {other: getattr(metadata.host, other) for other in needs} | {name: None}
        step_of_another = SimpleNamespace(host=SimpleNamespace(**fields), **fields)
        with pytest.raises(ValueError, match=rf"^metadata: no field {name}"):
            backend.check_metadata(step_of_another)


PAIRS = {
    "beyond a layer's cache": ([(3, 7)], "block 3 is outside the cache's 2 blocks"),
    "negative": ([(-1, 0)], "block -1 is outside"),
    "twice": ([(0, 1), (1, 1)], "a destination is named twice"),
    "three": ([(0, 1, 2)], "give integers of shape"),
    "floats": ([(0.5, 1.0)], "give integers of shape"),
}


@pytest.mark.parametrize("what", PAIRS)
def test_copies_are_refused_before_any_layer_is_changed(what):
    """By the default of AttentionBackend, for several layers."""
    pairs, text = PAIRS[what]
    backend = Least(config())
    caches = [backend.allocate_kv_cache(8).normal_(), backend.allocate_kv_cache(2).normal_()]
    before = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match=f"^src_to_dst: .*{text}"):
        backend.copy_blocks(caches, pairs)
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))


def test_a_layer_that_cannot_be_written_to_is_named_before_any_is_changed():
    backend = Least(config())
    first, second = backend.allocate_kv_cache(8).normal_(), backend.allocate_kv_cache(8)
    before = first.clone()
    with pytest.raises(ValueError, match=r"^dst_kv_cache: .*share memory"):
        backend.copy_blocks([first, second[:, :1].expand_as(second)], [(0, 1)])
    assert torch.equal(first, before)
    with pytest.raises(ValueError, match=r"^dst_kv_cache: blocks of"):
        backend.swap_blocks(first, second.half(), [(0, 1)])
    backend.copy_blocks([first, second], torch.tensor([(0, 1)]))
