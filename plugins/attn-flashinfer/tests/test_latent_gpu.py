"""Latent caches by the real FlashInfer on a CUDA device: what the kit's defaults leave out."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attn_flashinfer import modules
from attn_flashinfer.latent_wrappers import CapturedLatent
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


def test_a_plan_is_renewed_in_its_place_and_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same numbers; here FlashInfer shows what the first needs."""
    fast = CapturedLatent._fast_plan
    seen = []

    def found(self: CapturedLatent, *given: Any) -> Any:
        seen.append(fast(self, *given))
        return seen[-1]

    for renew in (found, lambda *_: None):
        monkeypatch.setattr(CapturedLatent, "_fast_plan", renew)
        CapturedLongEngine(made(num_heads=128), 1).run()
    assert seen
    assert None not in seen


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
