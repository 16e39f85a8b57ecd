"""Steps on the CPU, the stand-in in FlashInfer's place, against dense attention, in the kit's engine."""

from __future__ import annotations

import math
from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from attncore.builder import (
    CascadeRule,
    InputBatch,
    MetadataBuilder,
)
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.reading_engine import ReadingEngine
from attncore.testing.engines.run_batches import run_batch

MIXED = [(0, 9), (3, 3), (4, 1), (7, 1), (13, 1), (0, 1)]
FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 6},
    {"logits_soft_cap": 1.5},
    {"sliding_window": 5, "logits_soft_cap": 1.5},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_mixed_batches(layout: str, features: dict[str, Any]) -> None:
    run_batch(Engine(standin.backend(kv_cache_layout=layout), junk=math.nan, **features), MIXED)


def test_a_query_with_a_gradient_over_an_fp8_cache() -> None:
    """As of a model that runs outside of torch.no_grad."""
    backend = standin.backend(kv_cache_dtype="fp8_e4m3")
    impl = backend.impl("layers.0", scale=0.1, k_scale=torch.tensor([2.0, 1.0]), v_scale=torch.tensor([1.0, 0.5]))
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build({"a": 3})
    cache = backend.allocate_kv_cache(4)
    query, key, value = (torch.ones(3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    wanted = impl.forward(query, key, value, cache, metadata)
    found = impl.forward(query.requires_grad_(), key, value, cache, metadata)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2)])
def test_grouped_heads_and_sizes(heads: tuple[int, int]) -> None:
    for size in (64, 128, 256):
        backend = standin.backend(num_heads=heads[0], num_kv_heads=heads[1], head_size=size, dtype="float16")
        run_batch(Engine(backend, scale=0.1), MIXED)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1024.0, 1.0), (1.0, 1024.0)])
def test_an_fp8_cache_with_scales(scales: tuple[float, float], dtype: str) -> None:
    backend = standin.backend(kv_cache_dtype=dtype)
    engine = Engine(backend, k_scale=scales[0], v_scale=scales[1], scale=64**-0.5 / scales[0])
    run_batch(engine, MIXED)


@pytest.mark.parametrize("decode", ["auto", "xqa"])
@pytest.mark.parametrize("heads", [1, 2])
def test_an_fp8_cache_with_scales_on_the_device(heads: int, decode: str) -> None:
    """The library is given no scale then: it would read it on the host. A number beside a tensor is still given."""
    recorder = standin.Recorder()
    options: dict[str, Any] = {"decode": decode}
    backend = standin.backend(recorder, kv_cache_dtype="fp8_e4m3", block_size=16, options=options)
    k_scale, v_scale = torch.tensor([1024.0, 256.0])[:heads], torch.tensor([512.0, 2048.0])[:heads]
    if heads == 2 and decode == "xqa":
        with pytest.raises(ValueError, match="k_scale: decode=xqa reads one scale for all heads"):
            Engine(backend, k_scale=k_scale, v_scale=512.0)
        return
    for given in ((k_scale, v_scale), (k_scale, 512.0)):
        engine = Engine(backend, k_scale=given[0], v_scale=given[1], scale=64**-0.5 / 1024)
        run_batch(engine, MIXED)
        engine.impl.set_scales(given[0] / 2, given[1])
        engine.features["k_scale"] = given[0] / 2
        engine.add("later", 9)
        engine.step({"later": 9})


def test_layers_that_disagree_get_their_own_plan() -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder)
    first, second = Engine(backend), Engine(backend, sliding_window=5)
    backend.impl("layers.0", scale=64**-0.5)  # the second engine has forgotten the first one's key
    backend.impl("layers.2", scale=0.2, logits_soft_cap=3.0)
    run_batch(second, MIXED)
    run_batch(first, MIXED)
    seen = {(one["window_left"], one["logits_soft_cap"], one["sm_scale"]) for one in recorder.of("decode.plan")}
    assert seen == {(-1, None, 0.125), (4, None, 0.125), (-1, 3.0, 0.2)}


def test_log_sum_exp() -> None:
    run_batch(Engine(standin.backend(), with_lse=True, sliding_window=7), MIXED)


def test_an_output_with_gaps_is_filled_where_it_lies() -> None:
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=0.5)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    batch.add_request("a", [1])
    metadata = builder.build({"a": 3})
    tensors = [torch.randn(3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    wide = torch.full((3, 4, 80), 7.0, dtype=torch.bfloat16)
    output = wide[:, :, :64]
    assert impl.forward(*tensors, cache, metadata, output) is output
    torch.testing.assert_close(output, impl.forward(*tensors, cache, metadata))
    assert (wide[:, :, 64:] == 7.0).all()


def test_cuda_core_decodes_and_xqa() -> None:
    for kernel, size in (("cuda_cores", 4), ("xqa", 16)):
        recorder = standin.Recorder()
        backend = standin.backend(recorder, block_size=size, options={"decode": kernel})
        rows = [(0, 2 * size + 1), (size - 1, 3), (size, 1), (2 * size - 1, 1)]
        run_batch(Engine(backend, sliding_window=6), rows)
        assert bool(recorder.of("decode.plan")) == (kernel == "cuda_cores")
        assert len(recorder.of("prefill.plan")) > 0


def test_xqa_reads_a_query_with_gaps() -> None:
    """Slices of a fused tensor: XQA takes an address alone."""
    backend = standin.backend(block_size=16, options={"decode": "xqa"})
    impl = backend.impl("layers.0", scale=0.5)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=16)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    for name, block in (("a", 1), ("b", 2)):
        batch.add_request(name, [block], 3)
    fused = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    parts = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    metadata = builder.build()
    found = impl.forward(*parts, cache, metadata)
    torch.testing.assert_close(found, impl.forward(*(part.contiguous() for part in parts), cache, metadata))


@pytest.mark.parametrize("write", [True, False])
def test_a_shared_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch, write: bool) -> None:
    from attn_flashinfer import backend as module

    monkeypatch.setattr(module, "CascadeRule", lambda: CascadeRule(min_requests=2, min_prefix_tokens=4, min_saving=0.0))
    for apart in (False, True):  # all requests share, or all but one
        recorder = standin.Recorder()
        backend, given = standin.backend(recorder, options={"cascade": True}), {"with_lse": True, "junk": math.nan}
        engine = Engine(backend, **given) if write else ReadingEngine(backend, written_by="write_cache", **given)
        engine.add("a", 20)
        engine.fill({"a": 9})
        for name in "bcd":
            engine.add(name, 20, prefix_of="a", prefix_blocks=2)
        if apart:
            engine.add("other", 20)
            engine.fill({"other": 3})
        engine.step({"b": 3, "c": 1, "d": 5, "a": 1, **({"other": 1} if apart else {})})
        passes = recorder.of("prefill.plan")[-2:]
        assert [one["causal"] for one in passes] == [False, True]
        assert passes[0]["seq_lens"].tolist() == [8]
        assert len(passes[1]["qo_indptr"]) == 2 * (4 + apart) + 1
        read = passes[1]["paged_kv_indptr"].diff() * 4 - torch.where(passes[1]["paged_kv_indptr"].diff() > 0, 4, 0)
        assert (passes[1]["seq_lens"] == read + passes[1]["paged_kv_last_page_len"]).all()


def test_steps_built_in_inference_mode_first_and_outside_of_it_afterwards() -> None:
    engine = Engine(standin.backend())
    engine.add("a", 24)
    engine.add("b", 24)
    with torch.inference_mode():
        engine.step({"a": 9, "b": 9})
        engine.step({"a": 1, "b": 1})
    engine.step({"a": 1, "b": 4})
    engine.step({"a": 1, "b": 1})
