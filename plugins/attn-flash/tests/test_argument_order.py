"""Arguments of ``forward`` in another order or of another kind: TypeErrors that name them, and nothing is written."""

from __future__ import annotations

import flash_standin as standin
import pytest
import torch

from attncore.builder import CascadeRule, InputBatch, MetadataBuilder


@pytest.mark.parametrize("cache_is_known", [False, True])
@pytest.mark.parametrize("generation", ["2", "4"])
@pytest.mark.parametrize("method", ["forward", "forward_with_lse"])
def test_arguments_in_another_order(
    generation: str, method: str, cache_is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = standin.MADE[generation]()
    standin.install(monkeypatch, generation, made)
    backend = standin.create(generation)
    layer = backend.impl("layers.0", scale=1.0)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=standin.BLOCK[generation])
    batch.add_request("a", block_ids=[1], num_computed_tokens=0)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=16).build({"a": 3})
    query, key = (torch.ones(3, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    attend = getattr(layer, method)
    if cache_is_known:
        attend(query, key, key, cache, metadata)
    before = cache.clone()
    order = r"forward\(query, key, value, kv_cache, metadata\)$"
    for given, says in (
        ((metadata, query, key, key, cache), r"query: \w+ found; give the step's queries"),
        ((query, key, key, metadata, cache), "metadata: Tensor found; give the step's metadata"),
        ((query, metadata, key, key, cache), "metadata: Tensor found; give the step's metadata"),
        ((query, key, key, cache, None), "metadata: NoneType found; give the step's metadata"),
    ):
        with pytest.raises(TypeError, match=rf"^{says}.*{order}"):
            attend(*given)
        assert torch.equal(cache, before)


@pytest.mark.parametrize("cache_is_known", [False, True])
@pytest.mark.parametrize("generation", ["2", "4"])
@pytest.mark.parametrize("method", ["forward", "forward_with_lse", "forward_cascade"])
def test_whether_to_write_is_a_flag(
    generation: str, method: str, cache_is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = standin.MADE[generation]()
    standin.install(monkeypatch, generation, made)
    backend = standin.create(generation)
    layer = backend.impl("layers.0", scale=1.0)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=standin.BLOCK[generation])
    batch.add_request("a", block_ids=[1], num_computed_tokens=0)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=16).build({"a": 3})
    query, key = (torch.ones(3, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    if cache_is_known:
        layer.forward(query, key, key, cache, metadata)
    before = cache.clone()
    given = (query, 2 * key, key, cache, metadata, *([None] if method == "forward_cascade" else []))
    with pytest.raises(TypeError, match=r"^write: 'no' is not True or False"):
        getattr(layer, method)(*given, write="no")
    assert torch.equal(cache, before)


@pytest.mark.parametrize("generation", ["2", "3", "3_vllm", "4"])
def test_a_cascade_reads_no_query_beyond_those_that_are_given(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(monkeypatch, generation, standin.MADE[generation]())
    backend, size = standin.create(generation), standin.BLOCK[generation]
    layer, cache = backend.impl("layers.0", scale=1.0), backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=2 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16)
    for row in (0, 1):
        batch.add_request(row, block_ids=[1, 2 + row], num_computed_tokens=size)
    rule = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)
    query, key = (torch.ones(6, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    before, of_another = cache.clone(), backend.cascade(builder.build({0: 3, 1: 3}), rule)
    metadata = builder.build({0: 1, 1: 1})
    cascade = backend.cascade(metadata, rule)
    with pytest.raises(ValueError, match=r"^cascade: num_tokens 6 found; the metadata has 2"):
        layer.forward_cascade(query, key, key, cache, metadata, of_another)
    with pytest.raises(ValueError, match=r"^query: shape \(1, .*; the metadata has 2"):
        layer.forward_cascade(query[:1], key, key, cache, metadata, cascade)
    with pytest.raises(TypeError, match=r"^metadata: Tensor found"):
        layer.forward_cascade(query, key, key, metadata, cache, cascade)
    assert torch.equal(cache, before)
