"""Draft trees on the CPU: packed masks bit by bit, and eager steps, the stand-in in FlashInfer's place."""

from __future__ import annotations

from typing import Any

import flashinfer_standin as standin
import numpy as np
import pytest
import torch
from attn_flashinfer import backend as module
from attn_flashinfer import trees, wrappers
from attn_flashinfer.trees import MaskMemory, lag_of, packed_mask
from masks_by_hand import Row, drawn_rows, step_of
from tree_steps import DEEP, run

from attncore.builder import CascadeRule, InputBatch, MetadataBuilder
from attncore.testing.engines.steps_on_device import copied
from attncore.testing.engines.tree_engine import TreeEngine
from attncore.testing.harness.errors import ConformanceError

LAYERS: list[dict[str, Any]] = [{}, {"sliding_window": 6}, {"sliding_window": 3, "logits_soft_cap": 1.5}]


def unpacked(mask: Any, rows: list[Row]) -> list[Any]:
    """Bool (tokens, keys) of each row, from the bytes that a device would hold."""
    packed, places = MaskMemory("cpu").put(mask)
    found = []
    for row, place in zip(rows, places.tolist(), strict=False):
        size = row.tokens * row.length
        bits = np.unpackbits(packed.numpy()[place : place + -(-size // 8)], bitorder="little")
        assert bits[size:].all(), "bits that none reads are as they were"
        found.append(bits[:size].reshape(row.tokens, row.length).astype(bool))
    return found


@pytest.mark.parametrize("window", [None, 1, 3, 6, 30])
def test_masks_bit_by_bit(window: int | None) -> None:
    """Of a window the mask holds what is not hidden by index: the kernel hides that."""
    random = np.random.default_rng(window)
    for _ in range(60):
        rows = drawn_rows(random)
        masks, starts, lengths = step_of(rows)
        least = lag_of(masks, starts)
        for lag in (0,) if window is None else (least, least + 5):
            for row, found in zip(rows, unpacked(packed_mask(masks, starts, lengths, window, lag), rows), strict=True):
                if window is not None:
                    by_index = np.arange(row.length - row.tokens, row.length)[:, None] - np.arange(row.length)
                    found &= by_index < window + lag
                assert (found == row.sees(window)).all()


@pytest.mark.parametrize("counts_bits", [True, False])
@pytest.mark.parametrize("window", [None, 2, 40, 66, 80])
def test_the_largest_trees_beside_longer_chains(
    monkeypatch: pytest.MonkeyPatch, window: int | None, counts_bits: bool
) -> None:
    """The last bit of a mask is a sign; NumPy counts bits since 2.0."""
    if not counts_bits:
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    rows = [Row([*[-1] * 61, 60, 61], 64 + 9), Row(140, 145), Row([], 1), Row([*range(-1, 62)], 64 + 90)]
    masks, starts, lengths = step_of(rows)
    assert lag_of(masks, starts) == 60
    for row, found in zip(rows, unpacked(packed_mask(masks, starts, lengths, window, 60), rows), strict=True):
        if window is not None:
            found &= np.arange(row.length - row.tokens, row.length)[:, None] - np.arange(row.length) < window + 60
        assert (found == row.sees(window)).all()


def test_rows_of_padding() -> None:
    padded = packed_mask(np.zeros(9, np.int64), np.arange(0, 10, 3), np.array([5, 0, 0]), 4, 1)
    assert padded.indptr.tolist() == [0, 2, 2, 2]
    (found,) = unpacked(padded, [Row(3, 5)])
    assert found.astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    for window in (None, 1, 3):
        empty = packed_mask(np.zeros(48, np.int64), np.arange(0, 72, 24), np.array([0, 0]), window, 4)
        assert empty.indptr.tolist() == [0, 0, 0]
        assert empty.places.tolist() == []


def test_what_is_sent_does_not_follow_the_context() -> None:
    short, long = (packed_mask(*step_of([Row(DEEP, 20), Row(DEEP, length)]), 8, 7) for length in (30, 30000))
    assert len(long.places) <= len(short.places) + 30
    assert long.indptr[-1] > 40000


def test_masks_that_no_offset_reaches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_BYTES", 40)
    with pytest.raises(ValueError, match="metadata: the masks of draft trees take 42 bytes, and FlashInfer takes 40"):
        packed_mask(*step_of([Row(DEEP, 28)]), None)


@pytest.mark.parametrize("features", LAYERS, ids=str)
@pytest.mark.parametrize("changes", [
    {"kv_cache_layout": "HND"}, {"kv_cache_dtype": "fp8_e4m3", "dtype": "float16"}, {"num_heads": 2, "block_size": 1},
    {"options": {"decode": "cuda_cores"}}, {"options": {"decode": "xqa"}, "block_size": 16},
    {"options": {"cascade": True}},
], ids=str)  # fmt: skip
def test_eager_steps(changes: dict[str, Any], features: dict[str, Any]) -> None:
    xqa = changes.get("options") == {"decode": "xqa"}  # which has neither
    if xqa and "logits_soft_cap" in features:
        pytest.skip("decode=xqa has no soft cap")
    run(TreeEngine(standin.backend(**changes), num_blocks=500, with_lse=not xqa, **features))


def test_blocks_that_a_window_has_passed() -> None:
    """They hold finite numbers, as the spec asks: a kernel's window is wider than a tree's."""
    engine = TreeEngine(standin.backend(), num_blocks=100, sliding_window=6)
    for name in "ab":
        engine.add(name, 80)
    engine.fill({"a": 40, "b": 27})
    for name in "ab":
        engine.release_passed(name, 6)
    engine.tree_step({}, {"a": DEEP, "b": [-1] * 12})


def test_a_shared_prefix_beside_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two passes of the option cascade have no mask: a step with a tree does without them."""
    monkeypatch.setattr(module, "CascadeRule", lambda: CascadeRule(min_requests=2, min_prefix_tokens=4, min_saving=0.0))
    recorder = standin.Recorder()
    engine = TreeEngine(standin.backend(recorder, options={"cascade": True}))
    engine.add("a", 40)
    engine.fill({"a": 9})
    for name in "bc":
        engine.add(name, 40, prefix_of="a", prefix_blocks=2)
    engine.tree_step({"a": 2, "b": 3, "c": 2}, {})
    assert [one["causal"] for one in recorder.of("prefill.plan")[-2:]] == [False, True], "a step without trees has two"
    engine.tree_step({"a": 2}, {"b": DEEP, "c": [-1, -1]})
    assert recorder.of("prefill.plan")[-1]["packed_custom_mask"] is not None


def test_a_step_without_trees_has_no_mask() -> None:
    recorder = standin.Recorder()
    engine = TreeEngine(standin.backend(recorder), sliding_window=6)
    for name in "ab":
        engine.add(name, 40)
    engine.fill({"a": 9, "b": 4})
    for parents, lag in ((None, None), ([-1] * 5, 4), ([-1, 0, 1], 0), (None, None)):
        engine.tree_step({"a": 3} if parents else {"a": 3, "b": 2}, {"b": parents} if parents else {})
        plan = next(one for one in recorder.of("prefill.plan")[-2:] if one["window_left"] >= 0)  # of two layers
        assert (plan["packed_custom_mask"] is None) == (parents is None)
        assert plan["window_left"] == 5 + (lag or 0), "keys before a window are not read"
        if parents:
            engine.keep({"b": []}, {"b": parents})


@pytest.mark.parametrize("fault", ["places in bits", "not at bytes", "by index", "no mask", "last step's"])
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """What would be wrong on a GPU is wrong, or refused, here."""
    whole, last = wrappers.packed_mask, []

    def faulty(masks: Any, starts: Any, lengths: Any, window: Any, lag: int) -> Any:
        if fault == "by index":
            return whole(masks, starts, lengths, None, 0)
        if fault == "no mask":
            return whole(masks * 0, starts, lengths, window, lag)
        if fault == "last step's":
            last.append(masks)
            return whole(np.resize(last[-2] if len(last) > 1 else masks, masks.shape), starts, lengths, window, lag)
        right = whole(masks, starts, lengths, window, lag)
        packed, _ = MaskMemory("cpu").put(right)
        bits = [
            np.unpackbits(packed.numpy()[place:], bitorder="little")[:size]
            for place, size in zip(right.indptr.tolist(), (np.diff(starts) * lengths).tolist(), strict=False)
        ]
        together = np.packbits(np.concatenate(bits), bitorder="little")
        ends = np.cumsum([0, *map(len, bits)]) // 8
        return right._replace(
            indptr=np.concatenate((ends[:-1], [right.indptr[-1]])), places=np.arange(len(together)), values=together
        )

    if fault == "places in bits":
        monkeypatch.setattr(wrappers, "point_at", lambda *_: None)
    else:
        monkeypatch.setattr(wrappers, "packed_mask", faulty)
    if fault == "by index":
        monkeypatch.setattr(wrappers, "lag_of", lambda *_: 0)
    engine = TreeEngine(standin.backend(), num_blocks=200, sliding_window=6)
    with pytest.raises((ConformanceError, IndexError), match=r"differs|custom_mask_buf: bytes"):
        run(engine)


def test_what_flashinfer_keeps_elsewhere_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"flashinfer: object has no _mask_indptr_buf, where FlashInfer 0\.7\.2 keeps"
    ):
        trees.point_at(object(), torch.zeros(2))


def test_trees_among_prefills_are_refused() -> None:
    """No builder of ours makes such a step; an engine's own might."""
    backend = standin.backend()
    backend.impl("layers.0", scale=0.5)
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, decode_threshold=4, draft_trees=True)
    batch.add_request("a", [1, 2], 3)
    step = builder.build(trees={"a": [-1, -1, 0]})
    metadata = copied(backend, step)
    metadata.num_prefills, metadata.num_prefill_tokens = 1, 4
    metadata.num_decodes = metadata.num_decode_tokens = 0
    with pytest.raises(ValueError, match="metadata: draft trees among the prefills of a step; flashinfer runs them as"):
        backend.plan(metadata)
