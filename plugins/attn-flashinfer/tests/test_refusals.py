"""Bad input: an error that names what was asked, before anything is written or launched."""

from __future__ import annotations

import dataclasses
from typing import Any

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer import impl, modules

from attncore.builder import BatchSlice, InputBatch, MetadataBuilder, slice_metadata
from attncore.reference import ReferenceBackend


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_size": 96}, "head_size: 96 found; flashinfer's variant built accepts 64, 128, 256"),
        ({"head_size_v": 32}, "head_size_v: 32 found; flashinfer's variant built accepts the same as head_size, 64"),
        ({"kv_cache_dtype": "float32"}, "kv_cache_dtype: float32 found; flashinfer's variant built accepts auto"),
        ({"use_mla": True, "num_kv_heads": 1}, "use_mla: "),
        ({"dtype": "float32"}, "dtype: float32 found"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: float16 found beside bfloat16"),
        ({"kv_cache_layout": "HDN"}, "kv_cache_layout: 'HDN' is not one of"),
        ({"options": {"decode": "xqa"}}, "options: decode=xqa: block_size 4"),
        (
            {"options": {"decode": "xqa"}, "block_size": 16, "kv_cache_dtype": "fp8_e5m2"},
            "options: decode=xqa: a cache of fp8_e5m2",
        ),
        ({"options": {"decode": "cuda_cores"}, "num_heads": 10}, "options: decode=cuda_cores: groups of 5 heads"),
    ],
    ids=str,
)
def test_configurations(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        standin.backend(**changes)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ({"k_scale": 0.5}, "k_scale: 0.5 given for a cache of auto; only an fp8 cache"),
        ({"sinks": [0.1] * 3}, "sinks: "),
        ({"alibi_slopes": [0.1] * 4}, "alibi_slopes: flashinfer does not support alibi"),
        ({"attn_type": "encoder"}, "attn_type: flashinfer does not support encoder"),
        ({"sliding_window": 0}, "sliding_window: 0 is below 1"),
    ],
    ids=str,
)
def test_layers(features: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        standin.backend().impl("layers.0", scale=1.0, **features)
    assert str(caught.value).startswith(says)


def test_a_layer_that_is_refused_late_leaves_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*scales: float) -> None:
        raise ValueError("k_scale: refused by what writes the cache")

    backend = standin.backend()
    monkeypatch.setattr(impl, "CacheWriter", refuses)
    with pytest.raises(ValueError, match="k_scale: refused"):
        backend.impl("layers.0", scale=1.0)
    assert not backend._plans
    assert backend.plan_keys == ()


def test_a_window_over_an_fp8_cache_beside_xqa() -> None:
    backend = standin.backend(block_size=16, kv_cache_dtype="fp8_e4m3", options={"decode": "xqa"})
    with pytest.raises(ValueError, match="sliding_window: decode=xqa has not been shown right"):
        backend.impl("a", scale=1.0, sliding_window=8)
    backend.impl("a", scale=1.0)


def test_a_soft_cap_beside_xqa() -> None:
    backend = standin.backend(block_size=16, options={"decode": "xqa"})
    with pytest.raises(ValueError, match="logits_soft_cap: decode=xqa has none"):
        backend.impl("layers.0", scale=1.0, logits_soft_cap=3.0)
    with pytest.raises(ValueError, match="forward_with_lse: decode=xqa returns no log-sum-exp"):
        _stepped(backend, "forward_with_lse", backend.allocate_kv_cache(8))


def test_a_module_that_cannot_be_had_is_told_when_the_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = standin.backend()
    monkeypatch.setattr(type(backend), "_is_cuda", True)
    monkeypatch.setattr(modules, "find", lambda name: None)
    monkeypatch.setattr(modules, "no_compiler", lambda: "nvcc not found")
    with pytest.raises(ValueError, match="sliding_window: 5 with logits_soft_cap None needs the module"):
        backend.impl("layers.0", scale=1.0, sliding_window=5)
    # The prefills' module is there, that of decodes on CUDA cores is not.
    monkeypatch.setattr(modules, "find", lambda name: name if name.startswith("batch_prefill") else None)
    backend.impl("layers.0", scale=1.0, sliding_window=5)
    other = standin.backend(options={"decode": "cuda_cores"})
    monkeypatch.setattr(type(other), "_is_cuda", True)
    with pytest.raises(ValueError, match="needs the module batch_decode_with_kv_cache"):
        other.impl("layers.0", scale=1.0, sliding_window=5)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (torch.zeros(8, 4, 2, 64, dtype=torch.bfloat16), "kv_cache: shape (8, 4, 2, 64) found"),
        (
            torch.zeros(8, 2, 2, 4, 64, dtype=torch.bfloat16),
            "kv_cache: shape (8, 2, 2, 4, 64) found for layout NHD; expected",
        ),
        (torch.zeros(8, 2, 4, 2, 64), "kv_cache: torch.float32 found; the backend was made for torch.bfloat16"),
        (
            (torch.zeros(8, 4, 2, 64, dtype=torch.bfloat16), torch.zeros(8, 4, 4, 64, dtype=torch.bfloat16)[:, :, :2]),
            "kv_cache: strides (512, 128, 64, 1) of keys and (1024, 256, 64, 1) of values found",
        ),
    ],
    ids=["no halves", "another layout", "another dtype", "unequal strides"],
)
def test_caches(cache: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        _stepped(standin.backend(), "forward", cache)
    assert str(caught.value).startswith(says)


def test_a_batch_of_more_blocks_than_the_cache_has() -> None:
    backend = standin.backend()
    backend.impl("layers.0", scale=1.0)
    backend.allocate_kv_cache(8)
    for num_blocks in (9, 8):
        batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4, num_blocks=num_blocks)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
        batch.add_request("a", [num_blocks - 1])
        if num_blocks == 9:
            with pytest.raises(ValueError, match="num_blocks: the batch takes block ids below 9, but the largest"):
                builder.build()
    assert builder.build().num_reqs == 1


def test_a_view_of_a_step_whose_lengths_the_device_alone_knows_is_not_planned() -> None:
    """The plan would be made of the host's bounds. Another backend's step is such a one: this one refuses to build it
    without a graph.
    """
    backend = standin.backend()
    backend.impl("layers.0", scale=1.0)
    spec = dataclasses.replace(backend.config.spec, host_lengths="bounded")
    other = ReferenceBackend(dataclasses.replace(backend.config, spec=spec))
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    rejected = torch.zeros(2, dtype=torch.int32)
    builder = MetadataBuilder(batch, other, max_num_batched_tokens=8, num_rejected=rejected, transport="copy")
    for name in (1, 2):
        batch.add_request(name, [2 * name, 2 * name + 1], 3)
    exact = slice_metadata(builder.build(query_len=2), BatchSlice(0, 2, 0, 4), block_size=4)
    backend.plan(exact)
    view = slice_metadata(builder.build(query_len=2, overlapped=True), BatchSlice(0, 2, 0, 4), block_size=4)
    with pytest.raises(ValueError, match=r"^metadata: a view of a step whose lengths the device alone knows"):
        backend.plan(view)


def test_a_profiling_run_without_keys_gives_zeros() -> None:
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=1.0)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build_profile([3, 2])
    query = torch.randn(5, 4, 64, dtype=torch.bfloat16)
    nothing: Any = None
    assert not impl.forward(query, nothing, nothing, None, metadata, write=False).any()
    output = torch.full((5, 4, 64), 7.0, dtype=torch.bfloat16)
    assert impl.forward(query, nothing, nothing, None, metadata, output, write=False) is output
    assert not output.any()


def _stepped(backend: Any, method: str, cache: Any, **given: Any) -> None:
    impl = backend.impl("layers.0", scale=1.0)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=backend.config.block_size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    batch.add_request("a", [1])
    tensors = [torch.randn(1, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    getattr(impl, method)(*tensors, cache, builder.build(), **given)


@pytest.mark.parametrize("method", ["forward", "forward_with_lse"])
def test_whether_to_write_is_a_flag(method: str) -> None:
    backend = standin.backend()
    cache = backend.allocate_kv_cache(8)
    before = cache.clone()
    with pytest.raises(TypeError, match=r"^write: 'no' is not True or False"):
        _stepped(backend, method, cache, write="no")
    assert torch.equal(cache, before)


@pytest.mark.parametrize("cache_is_known", [False, True])
@pytest.mark.parametrize("method", ["forward", "forward_with_lse"])
def test_arguments_in_another_order(method: str, cache_is_known: bool) -> None:
    backend = standin.backend()
    layer = backend.impl("layers.0", scale=1.0)
    cache = backend.allocate_kv_cache(8)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=backend.config.block_size)
    batch.add_request("a", block_ids=[1], num_computed_tokens=0)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=16).build({"a": 3})
    query, key = (torch.ones(3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
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


@pytest.mark.parametrize("decode", ["tensor_cores", "xqa"])
def test_a_query_of_fewer_tokens_than_the_step_writes_nothing(decode: str) -> None:
    """A kernel would read and write beyond its rows."""
    backend = standin.backend(block_size=16, options={"decode": decode})
    impl, cache = backend.impl("layers.0", scale=0.1), backend.allocate_kv_cache(8)
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=16)
    for name, block in (("a", 1), ("b", 2), ("c", 3)):
        batch.add_request(name, [block], 5)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=64).build({"a": 1, "b": 1, "c": 4})
    tensors = [torch.ones(5, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match=r"query: shape \(5, 4, 64\) found; the metadata has 6"):
        impl.forward(*tensors, cache, metadata)
    assert not cache.any()
