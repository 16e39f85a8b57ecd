"""Draft trees through FlashInfer's own wrapper of prefills on the CPU: its Python, over a module in torch.

What is replaced is what needs a GPU: the compiled module and pinned memory. Decodes of one token are the stand-in's.
"""

from __future__ import annotations

import math
from typing import Any

import flashinfer_standin as standin
import numpy as np
import pytest
import torch
from attn_flashinfer.backend import FlashInferBackend
from attn_flashinfer.library import Library, flashinfer
from captured_tree_engine import CapturedTreeEngine
from flashinfer_standin_wrapper import masked_attention, row_lengths
from torch import Tensor
from tree_steps import DEEP, run

from attncore.testing.engines.tree_engine import TreeEngine

prefill = pytest.importorskip("flashinfer.prefill", reason="FlashInfer is not installed")
CAUSAL, CUSTOM = 1, 2


class Module:
    """The functions of a compiled module, with its arguments in its order."""

    def plan(self, *given: Any) -> list[int]:
        starts, indptr, windows = given[3], given[4], given[15]
        assert len(starts) == len(indptr)
        return [windows, len(starts)]

    def workspace_size(self, *given: Any) -> tuple[int, int]:
        return 0, 4096

    def paged_run(
        self, workspace: Tensor, ints: Tensor, info: list[int], q: Tensor, keys: Tensor, values: Tensor, starts: Tensor,
        indptr: Tensor, indices: Tensor, last: Tensor, out: Tensor, lse: Tensor | None, mode: int, layout: int,
        window: int, pdl: bool, packed: Tensor | None, places: Tensor | None, *others: Any,
    ) -> None:  # fmt: skip
        assert info == [window, len(starts)]
        cap, scale = others[4] or None, others[5]
        if layout:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        rows = row_lengths(starts.diff().tolist(), indptr, last, keys.shape[1])
        for number, (tokens, first, length) in enumerate(rows):
            if not tokens or not length:
                continue
            part = slice(int(starts[number]), int(starts[number + 1]))
            chosen = indices[first : first - (-length // keys.shape[1])].long()
            read = [half.float()[chosen].flatten(0, 1)[:length] for half in (keys, values)]
            mask = torch.ones(tokens, length, dtype=torch.bool)
            if mode == CAUSAL:
                mask = mask.tril(length - tokens)
            else:
                assert mode == CUSTOM
                assert packed is not None
                assert places is not None
                assert places.dtype == torch.int32
                begin, size = int(places[number]), tokens * length
                assert begin + -(-size // 8) <= len(packed)
                bits = np.unpackbits(packed[begin : begin + -(-size // 8)].numpy(), bitorder="little")[:size]
                mask = torch.from_numpy(bits.astype(np.bool_)).view(tokens, length)
            found, found_lse = masked_attention(q[part].float(), *read, mask, window, scale, cap)
            out[part] = found.to(out.dtype)
            if lse is not None:
                lse[part] = found_lse / math.log(2)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    module, stand_in = Module(), standin.library()
    monkeypatch.setattr(prefill, "get_batch_prefill_module", lambda *_: module)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory=False, **named: empty(*given, **named))
    return flashinfer()._replace(decode=stand_in.decode, fast_decode_plan=stand_in.fast_decode_plan)


def over(library: Library, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setattr(FlashInferBackend, "library", lambda _: library)
    made = standin.backend(**changes)
    del type(made).library  # the stand-in's
    return type(made)(made.config)


@pytest.mark.parametrize("features", [{}, {"sliding_window": 6, "logits_soft_cap": 1.5}], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_eager_steps(library: Library, monkeypatch: pytest.MonkeyPatch, layout: str, features: dict[str, Any]) -> None:
    run(TreeEngine(over(library, monkeypatch, kv_cache_layout=layout), num_blocks=200, with_lse=True, **features))


@pytest.mark.parametrize("features", [{}, {"sliding_window": 6}], ids=str)
def test_captured_sizes(library: Library, monkeypatch: pytest.MonkeyPatch, features: dict[str, Any]) -> None:
    engine = CapturedTreeEngine(over(library, monkeypatch), 5, others=(None, 4), with_lse=True, **features)
    for _ in range(8):
        engine.change()
        engine.replayed()


def test_pages_of_one_token_do_not_ask_for_the_kernel_of_four(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer compiles it where a plan promises rows of 4 tokens, and its other conditions hold."""
    seen = []
    monkeypatch.setattr(prefill, "_eagle_verify_fp8kv_sm90_prepare", lambda _, length, *__, **___: seen.append(length))
    engine = TreeEngine(over(library, monkeypatch, block_size=1))
    engine.add("a", 30)
    engine.fill({"a": 9})
    engine.tree_step({}, {"a": DEEP[:3]})
    captured = CapturedTreeEngine(over(library, monkeypatch, block_size=1), 4)
    captured.change()
    captured.replayed()
    assert seen
    assert set(seen) == {0}
