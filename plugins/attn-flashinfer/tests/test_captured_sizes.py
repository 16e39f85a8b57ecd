"""Captured sizes on the CPU, the stand-in in FlashInfer's place: what is planned for each, and what a replay reads."""

from __future__ import annotations

import math
from functools import partial

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer.pages import Pages
from attn_flashinfer.wrappers import CapturedDecode, LayerSettings

from attncore.builder import (
    InputBatch,
    MetadataBuilder,
)
from attncore.testing.engines import captured_engine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.captured_long_engine import CapturedLongEngine
from attncore.testing.engines.captured_reading_engine import WRITERS, CapturedReadingEngine
from attncore.testing.harness.errors import ConformanceError


class _Nothing:
    def replay(self) -> None:
        pass


def test_captured_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    for tokens in (1, 3):  # of one token, and with drafts
        recorder = standin.Recorder()
        engine = CapturedEngine(standin.backend(recorder), tokens, junk=math.nan)
        for _ in range(16):
            engine.change()
            engine.replayed()
        plans = recorder.of("fast_decode_plan")
        assert {one["q_len_per_req"] for one in plans} == {tokens}
        assert len({id(one["wrapper"]) for one in plans}) == len(captured_engine.CAPTURED_SIZES), (
            "one wrapper a captured size"
        )
        asked = [one for one in recorder.of("decode.plan") if one["q_len_per_req"] == tokens]
        firsts = [one for one in asked if one["indices"].numel() == 0]
        assert len(firsts) == len(captured_engine.CAPTURED_SIZES), "a captured size is planned in full once"


@pytest.mark.parametrize("decode", ["auto", "xqa"])
@pytest.mark.parametrize("written_by", WRITERS)
def test_captured_sizes_without_writing(monkeypatch: pytest.MonkeyPatch, written_by: str, decode: str) -> None:
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    backend = standin.backend(block_size=16, options={"decode": decode})
    engine = CapturedReadingEngine(backend, 1, written_by=written_by)
    for _ in range(8):
        engine.change()
        engine.replayed()


def test_a_captured_size_reads_pages_where_every_step_has_them() -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder)
    backend.impl("layers.0", scale=0.5)
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64, transport="copy")
    metadata = builder.capture(2)
    (plan,) = recorder.of("fast_decode_plan")
    indptr, indices, last = plan["wrapper"].buffers
    batch.add_request("a", [5, 6], 4)
    step = builder.build(bucket=2)
    step.replay(_Nothing())
    assert indptr.tolist() == [0, 2, 2]
    assert last.tolist() == [1, 0]
    assert indices[:2].tolist() == [5, 6]
    assert indices.numel() == 4 * 16, "room for the pages of all requests"
    assert metadata.num_reqs == 2


def test_the_first_plan_of_a_captured_size_leaves_the_devices_arrays_as_they_were() -> None:
    backend = standin.backend()
    indptr, last = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)
    CapturedDecode(
        backend.library(), backend.workspace, LayerSettings(backend.shape, 0.5, None, None), indptr=indptr,
        indices=torch.zeros(8, dtype=torch.int32), last_page_len=last, query_len=1, max_seq_len=16,
    )  # fmt: skip
    assert indptr.tolist() == [0, 1, 3]
    assert last.tolist() == [4, 2]


def test_xqa_in_captured_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    recorder = standin.Recorder()
    engine = CapturedEngine(standin.backend(recorder, block_size=16, options={"decode": "xqa"}), 1)
    for _ in range(8):
        engine.change()
        engine.replayed()
    assert not recorder.of("fast_decode_plan")


def test_drafts_in_captured_sizes_beside_xqa() -> None:
    """All sizes are captured first, and their layers run afterwards."""
    backend = standin.backend(block_size=16, options={"decode": "xqa"})
    impl = backend.impl("layers.0", scale=0.5)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=16)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16, decode_threshold=3, transport="copy")
    for metadata in [builder.capture(size, 3) for size in (4, 2)]:
        tensors = [torch.randn(metadata.num_tokens, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
        assert impl.forward(*tensors, cache, metadata).shape == (metadata.num_tokens, 4, 64)


def test_sizes_captured_in_inference_mode_are_planned_outside_of_it() -> None:
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=0.125)
    cache = backend.allocate_kv_cache(16)
    tensors = [torch.randn(6, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    with torch.inference_mode():
        batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16, decode_threshold=3, transport="copy")
        builder.capture(2, 3)
    batch.add_request("a", [1, 2], 3)
    assert impl.forward(*tensors, cache, builder.build({"a": 3}, bucket=2)).shape == (6, 4, 64)


def test_captured_sizes_over_changing_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    CapturedLongEngine(standin.backend(block_size=16), 3).run()


def test_a_captured_size_that_is_planned_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kit's short contexts it is not: the plans of rows of a few pages are all the same."""
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    planned, whole = set(), CapturedDecode.plan

    def plan(self: CapturedDecode, pages: Pages) -> None:
        if self not in planned or not int(pages.indptr[-1]):  # of an empty step: the captures
            whole(self, pages)
        if int(pages.indptr[-1]):
            planned.add(self)

    monkeypatch.setattr(CapturedDecode, "plan", plan)
    short = CapturedEngine(standin.backend(block_size=16), 1)
    for _ in range(8):
        short.change()
        short.replayed()
    with pytest.raises(ConformanceError, match="it is as if a plan of an earlier step was replayed"):
        CapturedLongEngine(standin.backend(block_size=16), 1).run()
