"""The real FlashInfer on a CUDA device: what the kit's defaults leave out."""

from __future__ import annotations

import gc
import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attn_flashinfer import modules
from unsynchronised import no_synchronisation

import attncore
from attncore import NoBackendError
from attncore.abstract import AttentionBackend
from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.given_caches import FORMS, pair_of_views
from attncore.testing.engines.reading_engine import ReadingEngine
from attncore.testing.engines.run_batches import run_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]
LONG = [(0, 70), (300, 1), (17, 1), (16, 5), (900, 1), (0, 1), (511, 40)]


def made(options: dict[str, Any] | None = None, **changes: Any) -> AttentionBackend:
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 16} | changes
    asked = {"options": {"flashinfer": options}} if options else {}
    try:
        choice = attncore.select(**request, **asked, backend="flashinfer")
    except NoBackendError as error:
        if "have to be compiled" not in str(error):
            raise
        pytest.skip(f"a module is not built, and cannot be compiled here: {modules.no_compiler()}")
    return choice.create()


@pytest.mark.parametrize("features", [{}, {"sliding_window": 33}, {"logits_soft_cap": 2.0}], ids=str)
def test_long_contexts_in_mixed_batches(features: dict[str, Any]) -> None:
    run_batch(Engine(made(), num_blocks=160, junk=math.nan, **features), LONG)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_hnd_and_an_fp8_cache_with_scales(dtype: str) -> None:
    for layout in ("NHD", "HND"):
        backend = made(kv_cache_layout=layout, kv_cache_dtype=dtype, features={"lse"})
        engine = Engine(backend, num_blocks=160, k_scale=2.0, v_scale=4.0, scale=64**-0.5 / 2, with_lse=True)
        run_batch(engine, LONG)


@pytest.mark.parametrize(
    ("decode", "dtype"),
    [("auto", "fp8_e4m3"), ("cuda_cores", "fp8_e4m3"), ("xqa", "fp8_e4m3"), ("auto", "fp8_e5m2"),
     ("cuda_cores", "fp8_e5m2")],
)  # fmt: skip
@pytest.mark.parametrize("heads", [1, 2])
def test_an_fp8_cache_with_scales_on_the_device(heads: int, decode: str, dtype: str) -> None:
    """None is a power of two: what is multiplied into the query and the output is rounded there once."""
    if decode == "xqa" and heads > 1:
        pytest.skip("XQA reads one scale for all heads")
    features = {"kv_scales_on_device"} | ({"kv_scales_per_head"} if heads > 1 else set())
    features |= {"lse"} if decode != "xqa" else set()
    backend = made({"decode": decode}, kv_cache_dtype=dtype, features=features)
    scales = {"k_scale": torch.tensor([3.0, 0.7])[:heads], "v_scale": torch.tensor([0.3, 5.0])[:heads]}
    engine = Engine(backend, num_blocks=160, scale=64**-0.5 / 3, with_lse=decode != "xqa", **scales)
    run_batch(engine, LONG)
    halved = {name: scale / 2 for name, scale in scales.items()}
    engine.impl.set_scales(**halved)
    engine.features.update(halved)
    engine.add("later", 40)
    engine.step({"later": 40})


def test_a_pair_of_caches() -> None:
    for form in FORMS:
        for options in ({}, {"decode": "cuda_cores"}, {"decode": "xqa"}):
            run_batch(Engine(made(options), num_blocks=160, cache=pair_of_views(form)), LONG)


def test_decodes_on_cuda_cores() -> None:
    for features in ({}, {"sliding_window": 33}):
        run_batch(
            Engine(made({"decode": "cuda_cores"}), num_blocks=160, junk=math.nan, with_lse=True, **features), LONG
        )


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_decodes_by_xqa(dtype: str) -> None:
    for features in ({}, {"sliding_window": 33}) if dtype == "auto" else ({},):
        run_batch(Engine(made({"decode": "xqa"}, kv_cache_dtype=dtype), num_blocks=160, **features), LONG)


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"k_scale": 3.0, "v_scale": 0.5},
        {"k_scale": torch.tensor(1024.0), "v_scale": torch.tensor(0.25), "scale": 64**-0.5 / 1024},
        {"sinks": [0.5, -1.0, 2.0, 0.0]},
    ],
    ids=str,
)
def test_xqa_over_fp8_without_being_asked(features: dict[str, Any]) -> None:
    """Chosen by itself; in graphs too, and with tensors far from 1 as scales."""
    backend = made(kv_cache_dtype="fp8_e4m3", features={"kv_scales_on_device", "sinks"})
    assert backend.config.variant.startswith("xqa"), backend.config.variant
    run_batch(Engine(backend, num_blocks=160, **features), LONG)
    engine = CapturedEngine(backend, 1, junk=math.nan, **features)
    for _ in range(60):
        engine.change()
        engine.replayed()


def test_xqa_over_what_nobody_owns() -> None:
    run_batch(Engine(made({"decode": "xqa"}), num_blocks=160, junk=math.nan), LONG)


@pytest.mark.parametrize("kernel", ["cuda_cores", "xqa"])
def test_captured_sizes_of_other_kernels(kernel: str) -> None:
    engine = CapturedEngine(made({"decode": kernel}), 1)
    for _ in range(100):
        engine.change()
        engine.replayed()


@pytest.mark.parametrize("features", [{"sliding_window": 9}, {"logits_soft_cap": 1.5, "sliding_window": 9}], ids=str)
def test_captured_sizes_with_features(features: dict[str, Any]) -> None:
    engine = CapturedEngine(made(block_size=4), 1, junk=math.nan, **features)
    for _ in range(100):
        engine.change()
        engine.replayed()


def test_a_shared_prefix_is_read_once() -> None:
    for apart, write in ((False, True), (True, True), (True, False)):
        backend, given = made({"cascade": True}), {"num_blocks": 200, "with_lse": True, "junk": math.nan}
        engine = Engine(backend, **given) if write else ReadingEngine(backend, written_by="write_cache", **given)
        engine.add("a", 420)
        engine.fill({"a": 400})
        for name in range(9):
            engine.add(name, 420, prefix_of="a", prefix_blocks=24)
        if apart:
            engine.add("other", 50)
            engine.fill({"other": 33})
        engine.step({**{name: 1 + name % 3 for name in range(9)}, "a": 1, **({"other": 1} if apart else {})})
        assert backend._plans[next(iter(backend.plan_keys))]._cascade is not None  # type: ignore[attr-defined]


def test_more_workspace_is_taken_where_a_plan_asks() -> None:
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    backend = made({"workspace_mib": 1}, **heads)
    run_batch(Engine(backend, num_blocks=600), [(3000, 1), (900, 1)])
    assert backend.workspace.buffer.numel() > 1 << 20  # type: ignore[attr-defined]
    small = made({"workspace_mib": 1, "max_workspace_mib": 1}, **heads)
    with pytest.raises(ValueError, match="max_workspace_mib: the plan asks for"):
        run_batch(Engine(small, num_blocks=600), [(3000, 1), (900, 1)])


def test_a_step_does_not_wait_for_the_device() -> None:
    """Build, plan, send and run of mixed steps, with torch's check on."""
    backend = made()
    impls = [backend.impl(f"layers.{i}", scale=0.125, sliding_window=window) for i, window in enumerate((None, 20))]
    cache = backend.allocate_kv_cache(64)
    batch = InputBatch(max_num_reqs=8, max_model_len=256, block_size=16, num_blocks=64)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=512)
    for name in range(6):
        batch.add_request(name, list(range(1 + 4 * name, 5 + 4 * name)), 5 * name + 1)
    tensors = [torch.randn(64, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)]

    def step() -> None:
        metadata = builder.build({5: 9, 4: 7})
        count = metadata.num_tokens
        for impl in impls:
            impl.forward(*(tensor[:count] for tensor in tensors), cache, metadata)

    step()
    with no_synchronisation():
        step()
        step()


def test_captured_sizes_of_the_list_builder() -> None:
    backend = made()
    impl = backend.impl("layers.0", scale=0.125)
    cache = backend.allocate_kv_cache(64)
    cache.normal_()
    builder = CommonMetadataBuilder(16, "flashinfer", max_seq_len_to_capture=256, backend=backend)
    state = backend.get_state_cls()(backend, builder)
    tensors = [torch.zeros(4, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)]
    graphs = {}
    gc.disable()
    with state.graph_capture(max_batch_size=4):
        for size in (4, 2):
            metadata = state.metadata_for_capture(size)
            layer = [tensor[:size] for tensor in tensors]
            impl.forward(*layer, cache, metadata)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = impl.forward(*layer, cache, metadata)
            graphs[size] = graph, output
    gc.enable()
    for count in (3, 1, 2, 4):
        decodes = [
            SequenceGroup(False, [Sequence(i, 1, 30 + 17 * i + count, [4 * i + j for j in range(1, 8)])])
            for i in range(count)
        ]
        for tensor in tensors:
            tensor.normal_()
        metadata = builder.build(decodes, state.pad_size(count))
        state.prepare(metadata)
        state.begin_forward(metadata)
        graph, output = graphs[metadata.num_reqs]
        graph.replay()
        found = output[:count].clone()
        eager = impl.forward(*(tensor[:count] for tensor in tensors), cache, builder.build(decodes))
        torch.testing.assert_close(found, eager, atol=2e-2, rtol=2e-2)
