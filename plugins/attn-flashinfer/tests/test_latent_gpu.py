"""Latent caches by the real FlashInfer on a CUDA device: what the kit's defaults leave out."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attn_flashinfer import latent_wrappers, modules
from unsynchronised import no_synchronisation

import attncore
from attncore import NoBackendError
from attncore.builder import InputBatch, MetadataBuilder
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.captured_long_engine import CapturedLongEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]
LONG = [(0, 70), (300, 1), (17, 1), (16, 5), (900, 1), (0, 1), (511, 40), (4001, 1)]
SIZES = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}


def made(kernels: str = "auto", **changes: Any) -> Any:
    request = {"num_heads": 16, "dtype": "bfloat16", "block_size": 64, **SIZES, **changes}
    try:
        choice = attncore.select(**request, options={"flashinfer": {"latent": kernels}}, backend="flashinfer")
    except NoBackendError as error:
        if "have to be compiled" not in str(error) and "runs on sm_90 alone" not in str(error):
            raise
        pytest.skip(str(error) if "alone" in str(error) else f"no module: {modules.no_compiler()}")
    return choice.create()


@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
@pytest.mark.parametrize(("heads", "block_size"), [(1, 1), (16, 64), (64, 16), (128, 64)])
def test_long_contexts_in_mixed_batches(kernels: str, heads: int, block_size: int) -> None:
    blocks = 2 * sum(-(-(context + tokens) // block_size) for context, tokens in LONG) + 8
    engine = Engine(
        made(kernels, num_heads=heads, block_size=block_size), num_blocks=blocks, junk=math.nan, with_lse=True
    )
    run_batch(engine, LONG)
    for name in (1, 2, 7):
        engine.grow(name, 3)
    engine.step({1: 3, 2: 3, 7: 3})


@pytest.mark.parametrize("scale", [3.0, torch.tensor([3.0])], ids=["number", "tensor"])
def test_an_fp8_cache(scale: Any) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("read on sm_90 alone")
    backend = made(kv_cache_dtype="fp8_e4m3")
    engine = Engine(backend, num_blocks=200, k_scale=scale, v_scale=scale, scale=576**-0.5 / 3, with_lse=True)
    run_batch(engine, LONG)


@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_captured_sizes(kernels: str, tokens: int) -> None:
    engine = CapturedEngine(made(kernels), tokens, junk=math.nan)
    for _ in range(100):
        engine.change()
        engine.replayed()
    CapturedLongEngine(made(kernels, num_heads=128), tokens).run()


def test_by_the_module_and_by_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same numbers; here FlashInfer shows what the first needs."""
    settle, seen = latent_wrappers.settled, []

    def found(*given: Any, **named: Any) -> Any:
        seen.append(settle(*given, **named))
        return seen[-1]

    for settled in (found, lambda *_, **__: None):
        monkeypatch.setattr(latent_wrappers, "settled", settled)
        CapturedLongEngine(made(num_heads=128), 1).run()
        run_batch(Engine(made(), num_blocks=200, junk=math.nan, with_lse=True), LONG)
    assert seen
    assert None not in seen


@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
@pytest.mark.parametrize("heads", [16, 128])
def test_outputs_are_the_wrappers_own(monkeypatch: pytest.MonkeyPatch, kernels: str, heads: int) -> None:
    """Bit for bit, with and without the log-sum-exp."""
    outputs = []
    settle = latent_wrappers.settled
    for settled in (settle, lambda *_, **__: None):
        monkeypatch.setattr(latent_wrappers, "settled", settled)
        backend = made(kernels, num_heads=heads)
        impl = backend.impl("layers.0", scale=0.07)
        torch.manual_seed(0)
        cache = backend.allocate_kv_cache(300)
        cache.copy_(torch.randn(cache.shape, device="cuda").to(cache.dtype))
        batch = InputBatch(max_num_reqs=8, max_model_len=8192, block_size=64, num_blocks=300)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=512)
        for name, context in enumerate((4000, 17, 700, 63, 64)):
            batch.add_request(name, list(range(1 + 63 * name, 64 + 63 * name))[: context // 64 + 2], context)
        metadata = builder.build({4: 40, 3: 3})
        query, rows = (torch.randn(metadata.num_tokens, count, 576, device="cuda").bfloat16() for count in (heads, 1))
        nothing: Any = None
        outputs.append(impl.forward(query, rows, nothing, cache, metadata).clone())
        outputs.extend(one.clone() for one in impl.forward_with_lse(query, rows, nothing, cache, metadata, write=False))
    ours, theirs = outputs[:3], outputs[3:]
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert torch.equal(ours[0], ours[1])


def test_a_step_does_not_wait_for_the_device() -> None:
    """Build, plan, send and run of mixed steps, with torch's check on."""
    backend = made()
    impl = backend.impl("layers.0", scale=0.1)
    cache = backend.allocate_kv_cache(64)
    batch = InputBatch(max_num_reqs=8, max_model_len=256, block_size=64, num_blocks=64)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=512)
    for name in range(6):
        batch.add_request(name, list(range(1 + 4 * name, 5 + 4 * name)), 5 * name + 1)
    query, rows = (torch.randn(64, heads, 576, dtype=torch.bfloat16, device="cuda") for heads in (16, 1))
    nothing: Any = None

    def step() -> None:
        metadata = builder.build({5: 9, 4: 7})
        count = metadata.num_tokens
        impl.forward(query[:count], rows[:count], nothing, cache, metadata)

    step()
    step()
    with no_synchronisation():
        step()
        step()


def test_more_queries_than_a_plan_has_room_for() -> None:
    """16,384 pieces of work: of 128 heads, as many tokens at most, in tiles of 128 packed queries."""
    backend = made(num_heads=128)
    backend.impl("layers.0", scale=0.1)
    batch = InputBatch(max_num_reqs=2, max_model_len=1 << 15, block_size=64)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=1 << 15)
    batch.add_request("a", list(range(1, 400)))
    with pytest.raises(ValueError, match=r"metadata: FlashInfer refuses to plan this step: .*work items"):
        builder.build({"a": 17000})
