"""Plans on the CPU, the stand-in in FlashInfer's place: what they are made of, ask for and refuse."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from attncore import CaptureError, PlanKey, attention, forward_context, graphs
from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
)
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch

MIXED = [(0, 9), (3, 3), (4, 1), (7, 1), (13, 1), (0, 1)]


def _two_requests(**pool: int) -> tuple[Any, Any]:
    backend = standin.backend(block_size=16)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16, **pool)
    for name, blocks in (("a", [1, 2]), ("b", [3, 9])):
        batch.add_request(name, blocks, 20)
    return backend, MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport="copy")


def test_a_plan_is_made_of_the_steps_own_arrays() -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder)
    backend.impl("layers.0", scale=0.5, sliding_window=9, logits_soft_cap=2.0)
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    for name, blocks, computed in (("a", [7, 2], 5), ("b", [3], 3), ("c", [9, 4, 1], 4)):
        batch.add_request(name, blocks, computed)
    metadata = builder.build({"c": 7})
    (decode,), (prefill,) = recorder.of("decode.plan"), recorder.of("prefill.plan")
    assert decode["indptr"].tolist() == [0, 2, 3]
    assert decode["last_page_len"].tolist() == [2, 4]
    assert decode["seq_lens"].tolist() == [6, 4]
    assert (decode["num_qo_heads"], decode["num_kv_heads"], decode["head_dim"], decode["page_size"]) == (4, 2, 64, 4)
    assert (decode["sm_scale"], decode["window_left"], decode["logits_soft_cap"]) == (0.5, 8, 2.0)
    assert (decode["q_data_type"], decode["kv_data_type"], decode["o_data_type"]) == (torch.bfloat16,) * 3
    assert prefill["qo_indptr"].tolist() == [0, 7]
    assert prefill["paged_kv_indptr"].tolist() == [3, 6]
    assert prefill["paged_kv_last_page_len"].tolist() == [3]
    assert prefill["paged_kv_indices"].tolist() == [7, 2, 3, 9, 4, 1]
    assert prefill["causal"] is True
    assert prefill["max_token_per_sequence"] == 7
    assert decode["indptr"].data_ptr() == metadata.host.paged_kv_indptr.ctypes.data, "the plan copies the host's array"


def test_more_workspace_is_taken_where_a_plan_asks() -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder, options={"workspace_mib": 1, "max_workspace_mib": 4})
    engine = Engine(backend)
    recorder.asks = 3 << 20
    run_batch(engine, MIXED)
    assert backend.workspace.buffer.numel() == 3 << 20
    recorder.asks = 5 << 20
    with pytest.raises(ValueError, match="max_workspace_mib: the plan asks for 5 MiB, 4 are allowed"):
        engine.step({0: 1})


def test_a_workspace_that_cannot_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next plan asks again, and gets it where there is room by then."""
    workspace = standin.backend(options={"workspace_mib": 1}).workspace
    buffer, empty = workspace.buffer, torch.empty

    def full(*args: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        workspace.reserve(2 << 20)
    monkeypatch.setattr(torch, "empty", empty)
    assert workspace.buffer is buffer
    workspace.reserve(2 << 20)
    assert workspace.buffer.numel() == 2 << 20


def test_a_step_that_was_not_planned_last_is_refused() -> None:
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=0.5)
    cache = backend.allocate_kv_cache(8)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    batch.add_request("a", [1, 2])
    old, new = builder.build(), builder.build()
    tensors = [torch.randn(1, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match="metadata: not of the step that was planned last"):
        impl.forward(*tensors, cache, old)
    assert impl.forward(*tensors, cache, new).shape == (1, 4, 64)


def test_a_plan_that_fails_leaves_no_plan_of_the_step_before() -> None:
    """Its decodes were planned, its prompts were not: the wrappers are of two steps."""
    recorder = standin.Recorder()
    backend = standin.backend(recorder, options={"workspace_mib": 1, "max_workspace_mib": 1})
    impl = backend.impl("layers.0", scale=0.125)
    cache = backend.allocate_kv_cache(16)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16)
    batch.add_request("a", [1, 2, 3], 5)
    batch.add_request("b", [4, 5, 6, 7], 2)
    tensors = [torch.randn(4, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    metadata = builder.build({"b": 3})
    impl.forward(*tensors, cache, metadata)
    recorder.asks, recorder.asks_of = 2 << 20, "prefill.plan"
    with pytest.raises(ValueError, match="max_workspace_mib"):
        builder.build({"b": 2})
    assert recorder.calls[-2][0] == "decode.plan"
    with pytest.raises(ValueError, match="metadata: not of the step that was planned last"):
        impl.forward(*tensors, cache, metadata)


def test_a_plan_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by hand, of the step that was planned last."""
    backend, builder = _two_requests()
    metadata = builder.build()
    monkeypatch.setattr(graphs, "is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match="plan: a stream is capturing"):
        backend.plan(metadata)


def test_a_block_beyond_the_cache_is_an_error_before_anything_runs() -> None:
    """Whether the batch was told its pool or not, and whoever allocated the cache."""
    backend, builder = _two_requests()
    backend.allocate_kv_cache(9)
    with pytest.raises(ValueError, match="metadata: block 9 is beyond the cache's num_blocks 9"):
        builder.build()
    backend, builder = _two_requests(num_blocks=16)
    backend.allocate_kv_cache(12)
    with pytest.raises(ValueError, match="num_blocks: the batch takes block ids below 16"):
        builder.build()
    for pool, says in (
        ({}, "block 9 is beyond"),
        ({"num_blocks": 16}, "kv_cache: num_blocks 9 found; the batch"),
    ):
        backend, builder = _two_requests(**pool)
        impl, metadata = backend.impl("layers.0", scale=0.5), builder.build()
        tensors = [torch.randn(2, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
        with pytest.raises(ValueError, match=says):
            impl.forward(*tensors, torch.zeros(9, 2, 16, 2, 64, dtype=torch.bfloat16), metadata)


def test_a_cache_that_is_allocated_behind_the_first_step_is_a_limit_too() -> None:
    backend, builder = _two_requests()
    builder.build()
    backend.allocate_kv_cache(9)
    with pytest.raises(ValueError, match="metadata: block 9 is beyond the cache's num_blocks 9"):
        builder.build()


def test_a_pair_of_caches_is_looked_at_once() -> None:
    """Through the operator, which makes a list of it in each call."""
    backend, builder = _two_requests()
    impl = backend.impl("layers.0", scale=0.5)
    keys, values = backend.allocate_kv_cache(12).unbind(1)
    tensors = [torch.randn(2, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    seen = []
    for halves in ([keys, values], (keys, values), [values, keys]):
        with forward_context(builder.build(), {"layers.0": impl}):
            attention(*tensors, halves, layer_name="layers.0")
        seen.append(impl._caches)
    assert seen[1] is seen[0]
    assert seen[2] is not seen[0]


def test_a_builder_that_is_dropped_is_gone() -> None:
    """The backend does not keep it, nor what it captured: another one may follow the same batch."""
    for options in ({}, {"decode": "xqa"}):
        backend = standin.backend(block_size=16, options=options)
        impl = backend.impl("layers.0", scale=0.5)
        cache = backend.allocate_kv_cache(4)
        batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
        batch.add_request("a", [1, 2])
        tensors = [torch.randn(1, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport="copy")
        impl.forward(*tensors, cache, builder.build())
        impl.forward(*tensors, cache, builder.capture(1))
        impl.forward(*tensors, cache, builder.build(bucket=1))
        captured = backend.plans_of(PlanKey(0.5, None, None))._captured
        assert len(captured) == (not options)
        gone = weakref.ref(builder)
        del builder
        gc.collect()
        assert gone() is None
        assert not captured
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport="copy")
        impl.forward(*tensors, cache, builder.build())


# Staging.


class _Event:
    """Stands in for a CUDA event; what is done with it is appended to ``log``."""

    log: list[str]

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait for the event")


def test_a_plan_that_no_builder_waited_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper's pinned staging is written to by each plan; the last plan's copy must have left it."""
    recorder = standin.Recorder()
    backend = standin.backend(recorder)
    impl = backend.impl("layers.0", scale=0.5)
    log: list[str] = []
    event, stream = type("Event", (_Event,), {"log": log}), type("Stream", (), {})()
    stream.synchronize = lambda: log.append("wait for the stream")
    monkeypatch.setattr(type(backend), "_is_cuda", True)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    by_hand = CommonMetadataBuilder(4, "flashinfer", backend=backend)
    decodes = [SequenceGroup(False, [Sequence(0, 1, 5, [3, 4])])]
    batches = [InputBatch(max_num_reqs=2, max_model_len=16, block_size=4) for _ in range(2)]
    builders = [MetadataBuilder(batch, backend, max_num_batched_tokens=8) for batch in batches]
    for batch in batches:
        batch.add_request("a", [1, 2])

    def waits(build: Any) -> list[str]:
        log.clear()
        build()
        return list(log)

    assert waits(builders[0].build) == ["record"], "no copy is under way before the first plan"
    assert waits(builders[0].build) == ["wait for the event"], "the first may have been planned by hand"
    metadata = builders[0].build()
    assert waits(builders[0].build) == [], "the builder has waited for its last step"
    assert waits(lambda: backend.plan(metadata)) == ["wait for the stream", "record"], "by hand: an older step"
    assert waits(lambda: backend.plan(metadata)) == ["wait for the event", "record"]
    assert waits(builders[0].build) == ["wait for the event"]
    assert waits(builders[0].build) == []
    assert waits(lambda: by_hand.build(decodes)) == ["wait for the stream", "record"]
    assert waits(lambda: by_hand.build(decodes)) == ["wait for the event", "record"]
    assert waits(builders[0].build) == ["wait for the event", "record"]
    assert waits(builders[1].build) == ["wait for the event", "record"], "another builder's plan"
    assert waits(builders[1].build) == ["wait for the event"]
    assert waits(builders[1].build) == []

    profile = builders[1].build_profile([3])
    for _ in range(2):
        builders[1].build()
    assert waits(builders[1].build) == []
    new = [torch.zeros(3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    for waited in ("stream", "event"):  # each layer plans for itself, behind what the builder waits for
        assert waits(lambda: impl.forward(*new, None, profile)) == [f"wait for the {waited}", "record"]
    assert waits(builders[1].build) == ["wait for the event"]
    assert waits(builders[1].build) == []
