"""Latent caches through FlashInfer's own wrapper on the CPU: its checks and its Python, over a module in torch.

What is replaced is what needs a GPU: the compiled module, what is asked of the device, and pinned memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer import latent_wrappers
from attn_flashinfer.latent import LatentBackend
from attn_flashinfer.library import Library, flashinfer
from flashinfer_standin_latent import Module

from attncore import InputBatch, MetadataBuilder
from attncore.testing.engines import captured_engine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
MIXED = [(0, 9), (3, 3), (8, 1), (7, 1), (13, 1), (0, 1)]


class InLibrary(Module):
    """The stand-in's module, as FlashInfer adapts those that it loads."""

    def plan_with_staged_workspace_bytes(self, *given: Any) -> tuple[list[int], int]:
        return self.plan(*given), 3 << 14


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    module = InLibrary(standin.Recorder())
    for place in (fa2_backend, fa3_backend):
        monkeypatch.setattr(place, "get_batch_mla_module", lambda *_: module)
    monkeypatch.setattr(_fa_common, "get_compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(_fa_common, "is_sm90a_supported", lambda _: True)
    monkeypatch.setattr(_fa_common, "get_device_sm_count", lambda _: 132)
    monkeypatch.setattr(_fa_common, "_get_fa_shared_memory_limits", lambda _: (233472, 232448))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory=False, **named: empty(*given, **named))
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    return flashinfer()


def over(library: Library, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setattr(LatentBackend, "library", lambda _: library)
    made = standin.latent_backend(**changes)
    del type(made).library  # the stand-in's
    return type(made)(made.config)


@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
def test_steps(library: Library, monkeypatch: pytest.MonkeyPatch, kernels: str, by_module: bool) -> None:
    if not by_module:
        monkeypatch.setattr(latent_wrappers, "settled", lambda *_, **__: None)
    backend = over(library, monkeypatch, options={"latent": kernels})
    run_batch(Engine(backend, with_lse=True, junk=math.nan), MIXED)
    fp8 = over(library, monkeypatch, kv_cache_dtype="fp8_e4m3", options={"latent": kernels})
    run_batch(Engine(fp8, k_scale=0.25, v_scale=0.25), MIXED)


@pytest.mark.parametrize("tokens", [1, 3])
def test_captured_sizes(library: Library, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    settle, seen = latent_wrappers.settled, []

    def found(*given: Any, **named: Any) -> Any:
        seen.append(settle(*given, **named))
        return seen[-1]

    for settled in (found, lambda *_, **__: None):  # by the module, and by the wrapper
        monkeypatch.setattr(latent_wrappers, "settled", settled)
        engine = CapturedEngine(over(library, monkeypatch), tokens, junk=math.nan)
        for _ in range(6):
            engine.change()
            engine.replayed()
    assert seen
    assert None not in seen


def test_a_step_that_flashinfer_refuses_to_plan(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = over(library, monkeypatch, num_heads=128, block_size=64)
    backend.impl("layers.0", scale=0.1)
    batch = InputBatch(max_num_reqs=2, max_model_len=1 << 15, block_size=64)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=1 << 15)
    batch.add_request("a", list(range(1, 400)))
    with pytest.raises(ValueError, match=r"metadata: FlashInfer refuses to plan this step: .*work items"):
        builder.build({"a": 17000})
    assert builder.build({"a": 3}).num_tokens == 3
