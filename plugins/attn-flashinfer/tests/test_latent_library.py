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
from attn_flashinfer.latent import LatentBackend
from attn_flashinfer.latent_wrappers import CapturedLatent
from attn_flashinfer.library import Library, flashinfer
from torch import Tensor

from attncore import InputBatch, MetadataBuilder
from attncore.dense import dense_attention
from attncore.testing.engines import captured_engine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
_PLACE = 1 << 14
MIXED = [(0, 9), (3, 3), (8, 1), (7, 1), (13, 1), (0, 1)]


class Module:
    """The functions of a compiled module, with its arguments in its order."""

    def plan(
        self, workspace: Tensor, ints: Tensor, pinned: Tensor, starts: Tensor, indptr: Tensor, lens: Tensor,
        num_heads: int, head_dim_o: int, causal: bool,
    ) -> list[int]:  # fmt: skip
        for place, array in enumerate((starts, indptr, lens)):
            assert array.dtype == torch.int32
            ints[place * _PLACE : place * _PLACE + 4 * len(array)] = array.contiguous().view(torch.uint8)
        return [2 if int(starts[-1]) * num_heads // len(lens) > 64 else 1, len(lens)]

    def plan_with_staged_workspace_bytes(self, *given: Any) -> tuple[list[int], int]:
        return self.plan(*given), 3 * _PLACE

    def run(
        self, workspace: Tensor, ints: Tensor, info: Any, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor,
        indices: Tensor, out: Tensor, lse: Tensor, mask: int, num_heads: int, page_size: int, scale: float,
        base_on_e: bool, ckv_scale: float, kpe_scale: float, scales: Any,
    ) -> None:  # fmt: skip
        count = info[1]
        starts, indptr, lens = (
            ints[place * _PLACE : place * _PLACE + 4 * size].view(torch.int32).tolist()
            for place, size in enumerate((count + 1, count + 1, count))
        )
        assert not base_on_e
        for row, length in enumerate(lens):
            part = slice(starts[row], starts[row + 1])
            if part.start == part.stop:
                continue
            if not length:
                out[part], lse[part] = 0, -math.inf
                continue
            chosen = indices[indptr[row] : indptr[row] - (-length // page_size)].long()
            values = ckv[chosen].flatten(0, 1)[:length, None].float() * ckv_scale
            keys = torch.cat((values, kpe[chosen].flatten(0, 1)[:length, None].float() * kpe_scale), dim=2)
            query = torch.cat((q_nope[part], q_pe[part]), dim=2).float()
            found = dense_attention(query, keys, values, scale=scale, causal=mask == 1, return_lse=True)
            out[part], lse[part] = found[0].to(out.dtype), found[1] / math.log(2)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    module = Module()
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


@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
def test_steps(library: Library, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    backend = over(library, monkeypatch, options={"latent": kernels})
    run_batch(Engine(backend, with_lse=True, junk=math.nan), MIXED)
    fp8 = over(library, monkeypatch, kv_cache_dtype="fp8_e4m3", options={"latent": kernels})
    run_batch(Engine(fp8, k_scale=0.25, v_scale=0.25), MIXED)


@pytest.mark.parametrize("tokens", [1, 3])
def test_captured_sizes(library: Library, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    fast, seen = CapturedLatent._fast_plan, []

    def found(self: CapturedLatent, *given: Any) -> Any:
        seen.append(fast(self, *given))
        return seen[-1]

    for renew in (found, lambda *_: None):  # in its place, and as a whole
        monkeypatch.setattr(CapturedLatent, "_fast_plan", renew)
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
