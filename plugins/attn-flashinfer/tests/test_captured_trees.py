"""Draft trees in captured sizes on the CPU, the stand-in in FlashInfer's place."""

from __future__ import annotations

from typing import Any

import flashinfer_standin as standin
import numpy as np
import pytest
import torch
from attn_flashinfer import captured_trees, trees
from attn_flashinfer.captured_trees import CapturedTrees
from attn_flashinfer.trees import MaskMemory
from captured_tree_engine import CapturedLongTreeEngine, CapturedTreeEngine

from attncore.builder import InputBatch, MetadataBuilder
from attncore.testing.engines.captured_long_engine import SHORTER
from attncore.testing.harness.errors import ConformanceError

LAYERS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 3},
    {"sliding_window": 9, "logits_soft_cap": 1.5},
]


def run(steps: int = 12, tokens: int = 7, **features: Any) -> standin.Recorder:
    """Steps of a layer with ``features`` beside others; ConformanceError where one differs."""
    recorder = standin.Recorder()
    engine = CapturedTreeEngine(standin.backend(recorder), tokens, others=(None, 5, 12), **features)
    for _ in range(steps):
        engine.change()
        engine.replayed()
    return recorder


@pytest.mark.parametrize("features", LAYERS, ids=str)
@pytest.mark.parametrize("tokens", [2, 7])
def test_every_replay_sees_the_trees_of_its_step(tokens: int, features: dict[str, Any]) -> None:
    recorder = run(tokens=tokens, **features)
    masked = [one for one in recorder.of("prefill.plan") if one["uniform_q_len"] == tokens]
    assert {one["window_left"] for one in masked} >= {-1, 4 + tokens - 2, 11 + tokens - 2}


def test_rows_that_grow_and_shrink() -> None:
    CapturedLongTreeEngine(standin.backend(), 5, contexts=SHORTER, sliding_window=200).run()


def test_log_sum_exp_and_pages_of_one_token() -> None:
    engine = CapturedTreeEngine(
        standin.backend(block_size=1, kv_cache_layout="HND"), 4, with_lse=True, sliding_window=5, longest=24
    )
    for _ in range(8):
        engine.change()
        engine.replayed()


def builders_of(recorder: standin.Recorder) -> tuple[Any, list[MetadataBuilder]]:
    """A backend with two layers, and two builders of trees for it."""
    backend = standin.backend(recorder)
    backend.impl("layers.0", scale=0.5)
    backend.impl("layers.1", scale=0.5, sliding_window=6)
    return backend, [
        MetadataBuilder(
            InputBatch(max_num_reqs=4, max_model_len=20, block_size=4), backend, max_num_batched_tokens=32,
            decode_threshold=6, transport="copy", draft_trees=True,
        )
        for _ in range(2)
    ]  # fmt: skip


def test_sizes_of_one_token_have_no_mask() -> None:
    recorder = standin.Recorder()
    _, (builder, _) = builders_of(recorder)
    builder.capture(2)
    assert not recorder.of("prefill.plan")
    assert recorder.of("fast_decode_plan")
    builder.capture(3, 2)
    assert recorder.of("prefill.plan")


def test_the_largest_size_has_the_mask_of_all_sizes() -> None:
    """Each layer's key has one, for sizes of one builder; another builder has its own."""
    backend, builders = builders_of(standin.Recorder())
    found = []
    for builder in builders:
        for size, tokens in ((4, 6), (2, 6), (1, 3)):
            metadata = builder.capture(size, tokens)
            for key in backend.plan_keys[:2]:
                captured = backend.plans_of(key).captured_of(metadata)
                assert isinstance(captured, CapturedTrees)
                found.append(captured.memory.buffer.data_ptr())
                assert len(captured.memory.buffer) == 4 * 15, "6 tokens of 20 keys, in whole bytes"
    assert len(set(found)) == 4
    assert found[:2] * 3 + found[6:8] * 3 == found


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_first_or_afterwards(first: bool) -> None:
    backend, (builder, _) = builders_of(standin.Recorder())
    batch = builder.batch
    impl, cache = backend.impl("layers.2", scale=0.5), backend.allocate_kv_cache(16)
    batch.add_request("a", [1, 2, 3], 3)
    tensors = [torch.randn(12, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    with torch.inference_mode(first):
        builder.capture(2, 6)
    for mode in (first, not first):
        with torch.inference_mode(mode):
            for options in ({"bucket": 2}, {}):
                metadata = builder.build(trees={"a": [-1, -1, 0, 0, 1]}, **options)
                count = metadata.num_tokens
                assert impl.forward(*(one[:count] for one in tensors), cache, metadata).shape == (count, 4, 64)
                builder.keep_paths({"a": []})


def test_where_trees_are_planned_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    backend, (builder, _) = builders_of(standin.Recorder("0.7.2"))
    caplog.set_level("INFO")
    builder.capture(2, 6)
    assert [(one.levelname, one.message.rpartition(": ")[2]) for one in caplog.records] == [
        ("INFO", "the masks of draft trees are made on the host, with each step's plan")
    ]
    assert backend.plan_of_captured == "host"


def test_a_plan_on_the_device_that_is_asked_for_is_refused() -> None:
    backend = standin.backend(standin.Recorder("0.7.2"), options={"plan": "device"})
    with pytest.raises(
        ValueError, match="options: plan=device asked for, but the masks of draft trees are made on the"
    ):
        CapturedTreeEngine(backend, 3)


def test_the_stand_in_refuses_what_flashinfer_refuses() -> None:
    """A mask without memory in a graph, one that is too short, one for which there is no room."""
    starts, indptr, last = (torch.tensor(given, dtype=torch.int32) for given in ([0, 3], [0, 1], [4]))
    kind = standin.library().prefill

    def plan(packed: int, **buffers: Any) -> None:
        memory = torch.zeros(64, dtype=torch.uint8)
        graph = {
            "qo_indptr_buf": starts.clone(), "paged_kv_indptr_buf": indptr.clone(),
            "paged_kv_indices_buf": torch.zeros(4, dtype=torch.int32), "paged_kv_last_page_len_buf": last.clone(),
        }  # fmt: skip
        wrapper = kind(memory, use_cuda_graph=True, **{**graph, **buffers})
        wrapper.plan(
            starts, indptr, indptr[:0], last, 4, 2, 64, 4, packed_custom_mask=torch.zeros(packed, dtype=torch.uint8)
        )

    places, room = torch.zeros(2, dtype=torch.int32), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="custom_mask_buf must be initialized"):
        plan(2, mask_indptr_buf=places)
    with pytest.raises(ValueError, match="mask_indptr_buf must be initialized"):
        plan(2, custom_mask_buf=room)
    with pytest.raises(ValueError, match=r"packed_custom_mask: torch\.uint8, 1 bytes given, 2 needed"):
        plan(1, custom_mask_buf=room, mask_indptr_buf=places)
    with pytest.raises(RuntimeError, match="doesn't match"):
        plan(2, custom_mask_buf=room[:1], mask_indptr_buf=places)
    with pytest.raises(ValueError, match="paged_kv_last_page_len_buf should be"):
        plan(2, paged_kv_last_page_len_buf=None)


@pytest.mark.parametrize("fault", ["mask of the capture", "mask of the last step", "places", "window"])
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Steps with trees that a graph would read wrongly differ, or are refused."""
    whole, put, last = captured_trees.packed_mask, MaskMemory.put, {}

    def masked(masks: Any, starts: Any, lengths: Any, window: Any, lag: int) -> Any:
        before = last.get(len(starts), masks * 0)
        last[len(starts)] = masks.copy()
        if fault == "window":
            return whole(masks, starts, lengths, None, 0)
        if fault.startswith("mask"):
            masks = before if fault == "mask of the last step" else masks * 0
        return whole(masks, starts, lengths, window, lag)

    def placed(self: MaskMemory, mask: Any) -> Any:
        packed, places = put(self, mask)
        return packed, places // 2 if fault == "places" else places

    monkeypatch.setattr(captured_trees, "packed_mask", masked)
    monkeypatch.setattr(MaskMemory, "put", placed)
    with pytest.raises((ConformanceError, IndexError), match=r"differs|custom_mask_buf"):
        run(sliding_window=9)


def test_a_mask_longer_than_the_captured_sizes() -> None:
    memory = MaskMemory("cpu", 4)
    mask = trees.packed_mask(np.ones(1, np.int64), np.array([0, 1]), np.array([41]), None)
    with pytest.raises(
        ValueError, match="the masks of draft trees take 6 bytes, and the captured size has 4; a request"
    ):
        memory.put(mask)
    grown = MaskMemory("cpu")
    assert grown.put(mask)[0].tolist() == [255] * 6
