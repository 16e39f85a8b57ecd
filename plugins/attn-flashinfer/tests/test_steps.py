"""Steps on the CPU, the stand-in in FlashInfer's place, against dense attention, in the kit's engine."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from typing import Any

import flashinfer_standin as standin
import pytest
import torch
from attn_flashinfer.wrappers import CapturedDecode, LayerSettings

from attncore import CaptureError, PlanKey, attention, forward_context, graphs
from attncore.builder import (
    CascadeRule,
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
)
from attncore.testing.engines import captured_engine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch

MIXED = [(0, 9), (3, 3), (4, 1), (7, 1), (13, 1), (0, 1)]
FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 6},
    {"logits_soft_cap": 1.5},
    {"sliding_window": 5, "logits_soft_cap": 1.5},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_mixed_batches(layout: str, features: dict[str, Any]) -> None:
    run_batch(Engine(standin.backend(kv_cache_layout=layout), junk=math.nan, **features), MIXED)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2)])
def test_grouped_heads_and_sizes(heads: tuple[int, int]) -> None:
    for size in (64, 128, 256):
        backend = standin.backend(num_heads=heads[0], num_kv_heads=heads[1], head_size=size, dtype="float16")
        run_batch(Engine(backend, scale=0.1), MIXED)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1024.0, 1.0), (1.0, 1024.0)])
def test_an_fp8_cache_with_scales(scales: tuple[float, float]) -> None:
    backend = standin.backend(kv_cache_dtype="fp8_e4m3")
    engine = Engine(backend, k_scale=scales[0], v_scale=scales[1], scale=64**-0.5 / scales[0])
    run_batch(engine, MIXED)


def test_layers_that_disagree_get_their_own_plan() -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder)
    first, second = Engine(backend), Engine(backend, sliding_window=5)
    backend.impl("layers.0", scale=64**-0.5)  # the second engine has forgotten the first one's key
    backend.impl("layers.2", scale=0.2, logits_soft_cap=3.0)
    run_batch(second, MIXED)
    run_batch(first, MIXED)
    seen = {(one["window_left"], one["logits_soft_cap"], one["sm_scale"]) for one in recorder.of("decode.plan")}
    assert seen == {(-1, None, 0.125), (4, None, 0.125), (-1, 3.0, 0.2)}


def test_log_sum_exp() -> None:
    run_batch(Engine(standin.backend(), with_lse=True, sliding_window=7), MIXED)


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


def test_an_output_with_gaps_is_filled_where_it_lies() -> None:
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=0.5)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    batch.add_request("a", [1])
    metadata = builder.build({"a": 3})
    tensors = [torch.randn(3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    wide = torch.full((3, 4, 80), 7.0, dtype=torch.bfloat16)
    output = wide[:, :, :64]
    assert impl.forward(*tensors, cache, metadata, output) is output
    torch.testing.assert_close(output, impl.forward(*tensors, cache, metadata))
    assert (wide[:, :, 64:] == 7.0).all()


class _Nothing:
    def replay(self) -> None:
        pass


def test_cuda_core_decodes_and_xqa() -> None:
    for kernel, size in (("cuda_cores", 4), ("xqa", 16)):
        recorder = standin.Recorder()
        backend = standin.backend(recorder, block_size=size, options={"decode": kernel})
        rows = [(0, 2 * size + 1), (size - 1, 3), (size, 1), (2 * size - 1, 1)]
        run_batch(Engine(backend, sliding_window=6), rows)
        assert bool(recorder.of("decode.plan")) == (kernel == "cuda_cores")
        assert len(recorder.of("prefill.plan")) > 0


def test_xqa_in_captured_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    recorder = standin.Recorder()
    engine = CapturedEngine(standin.backend(recorder, block_size=16, options={"decode": "xqa"}), 1)
    for _ in range(8):
        engine.change()
        engine.replayed()
    assert not recorder.of("fast_decode_plan")


def test_xqa_reads_a_query_with_gaps() -> None:
    """Slices of a fused tensor: XQA takes an address alone."""
    backend = standin.backend(block_size=16, options={"decode": "xqa"})
    impl = backend.impl("layers.0", scale=0.5)
    cache = backend.allocate_kv_cache(4)
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=16)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    for name, block in (("a", 1), ("b", 2)):
        batch.add_request(name, [block], 3)
    fused = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    parts = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    metadata = builder.build()
    found = impl.forward(*parts, cache, metadata)
    torch.testing.assert_close(found, impl.forward(*(part.contiguous() for part in parts), cache, metadata))


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


def test_a_shared_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_flashinfer import backend as module

    monkeypatch.setattr(module, "CascadeRule", lambda: CascadeRule(min_requests=2, min_prefix_tokens=4, min_saving=0.0))
    for apart in (False, True):  # all requests share, or all but one
        recorder = standin.Recorder()
        engine = Engine(standin.backend(recorder, options={"cascade": True}), with_lse=True, junk=math.nan)
        engine.add("a", 20)
        engine.fill({"a": 9})
        for name in "bcd":
            engine.add(name, 20, prefix_of="a", prefix_blocks=2)
        if apart:
            engine.add("other", 20)
            engine.fill({"other": 3})
        engine.step({"b": 3, "c": 1, "d": 5, "a": 1, **({"other": 1} if apart else {})})
        passes = recorder.of("prefill.plan")[-2:]
        assert [one["causal"] for one in passes] == [False, True]
        assert passes[0]["seq_lens"].tolist() == [8]
        assert len(passes[1]["qo_indptr"]) == 2 * (4 + apart) + 1
        read = passes[1]["paged_kv_indptr"].diff() * 4 - torch.where(passes[1]["paged_kv_indptr"].diff() > 0, 4, 0)
        assert (passes[1]["seq_lens"] == read + passes[1]["paged_kv_last_page_len"]).all()


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


def test_a_plan_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by hand, of the step that was planned last."""
    backend, builder = _two_requests()
    metadata = builder.build()
    monkeypatch.setattr(graphs, "is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match="plan: a stream is capturing"):
        backend.plan(metadata)


def _two_requests(**pool: int) -> tuple[Any, Any]:
    backend = standin.backend(block_size=16)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16, **pool)
    for name, blocks in (("a", [1, 2]), ("b", [3, 9])):
        batch.add_request(name, blocks, 20)
    return backend, MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport="copy")


def test_a_block_beyond_the_cache_is_an_error_before_anything_runs() -> None:
    """Whether the batch was told its pool or not, and whoever allocated the cache."""
    backend, builder = _two_requests()
    backend.allocate_kv_cache(9)
    with pytest.raises(ValueError, match="metadata: block 9 is beyond the cache's 9 blocks"):
        builder.build()
    backend, builder = _two_requests(num_blocks=16)
    backend.allocate_kv_cache(12)
    with pytest.raises(ValueError, match="num_blocks: the batch takes ids of 16 blocks"):
        builder.build()
    for pool, says in (({}, "block 9 is beyond"), ({"num_blocks": 16}, "kv_cache: 9 blocks found; the batch takes")):
        backend, builder = _two_requests(**pool)
        impl, metadata = backend.impl("layers.0", scale=0.5), builder.build()
        tensors = [torch.randn(2, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
        with pytest.raises(ValueError, match=says):
            impl.forward(*tensors, torch.zeros(9, 2, 16, 2, 64, dtype=torch.bfloat16), metadata)


def test_a_cache_that_is_allocated_behind_the_first_step_is_a_limit_too() -> None:
    backend, builder = _two_requests()
    builder.build()
    backend.allocate_kv_cache(9)
    with pytest.raises(ValueError, match="metadata: block 9 is beyond the cache's 9 blocks"):
        builder.build()


def test_steps_built_in_inference_mode_first_and_outside_of_it_afterwards() -> None:
    engine = Engine(standin.backend())
    engine.add("a", 24)
    engine.add("b", 24)
    with torch.inference_mode():
        engine.step({"a": 9, "b": 9})
        engine.step({"a": 1, "b": 1})
    engine.step({"a": 1, "b": 4})
    engine.step({"a": 1, "b": 1})


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


# The list builder.


def test_steps_of_the_list_builder() -> None:
    engine = Engine(standin.backend())
    for name, context in (("p", 6), ("d", 5), ("e", 8)):
        engine.add(name, context + 8)
    engine.fill({"p": 6, "d": 5, "e": 8})
    engine.list_step({"p": 5}, {"d": 1, "e": 1}, hit=True)
    engine.list_step({}, {"p": 3, "d": 3})  # decodes of several tokens: no page lists
    engine.list_step({}, {"d": 1}, pad=2)


def test_windowed_prompts_of_the_list_builder_are_refused() -> None:
    engine = Engine(standin.backend(), sliding_window=5)
    engine.add("a", 12)
    with pytest.raises(ValueError, match="metadata: the list builder gives the early tokens of a windowed prompt no"):
        engine.list_step({"a": 11}, {})


def test_a_block_beyond_the_cache_is_refused() -> None:
    backend = standin.backend()
    backend.impl("layers.0", scale=0.5)
    backend.allocate_kv_cache(8)
    builder = CommonMetadataBuilder(4, "flashinfer", backend=backend)
    with pytest.raises(ValueError, match="metadata: block 8 is beyond the cache's 8 blocks"):
        builder.build([SequenceGroup(False, [Sequence(0, 1, 5, [3, 8])])])


def test_captured_sizes_of_the_list_builder() -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder)
    impl = backend.impl("layers.0", scale=64**-0.5)
    cache = backend.allocate_kv_cache(16)
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=32, backend=backend)
    state = backend.get_state_cls()(backend, builder)
    query, key, value = (torch.zeros(4, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    captured = {}
    with state.graph_capture(max_batch_size=4):
        for size in (4, 2):
            captured[size] = state.metadata_for_capture(size)
            impl.forward(query[:size], key[:size], value[:size], cache, captured[size])
    decodes = [SequenceGroup(False, [Sequence(i, 1, 5 + i, [2 * i + 1, 2 * i + 2])]) for i in range(3)]
    metadata = builder.build(decodes, state.pad_size(3))
    state.prepare(metadata)
    state.begin_forward(metadata)
    cache.normal_()
    for tensor in (query, key, value):
        tensor.normal_()
    # As a replay: the layer over the metadata of the capture, which has the buffers.
    answer = impl.forward(query, key, value, cache, captured[4])
    eager = impl.forward(query[:3], key[:3], value[:3], cache, builder.build(decodes))
    torch.testing.assert_close(answer[:3], eager)
    assert len(recorder.of("fast_decode_plan")) == 3


def test_builders_of_the_list_builder_have_their_own_captured_sizes() -> None:
    """Such as those of two pipeline stages in one process."""
    backend = standin.backend()
    backend.impl("layers.0", scale=64**-0.5)
    stages = []
    for _ in range(2):
        builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=32, backend=backend)
        state = backend.get_state_cls()(backend, builder)
        with state.graph_capture(max_batch_size=4):
            stages.append((builder, state, state.metadata_for_capture(4)))
    decodes = [SequenceGroup(False, [Sequence(i, 1, 5 + i, [2 * i + 1, 2 * i + 2])]) for i in range(3)]
    for builder, state, captured in stages:
        builder.build(decodes, state.pad_size(3))
        (part,) = backend.plans_of(backend.plan_keys[0]).step.parts
        assert part.run.__self__.buffers[0].data_ptr() == captured.paged_kv_indptr.data_ptr()  # type: ignore[attr-defined]


def test_two_states_of_one_builder_keep_their_captured_sizes() -> None:
    """What a graph reads stays, whichever was captured last."""
    backend = standin.backend()
    backend.impl("layers.0", scale=64**-0.5)
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=32, backend=backend)
    states = [backend.get_state_cls()(backend, builder) for _ in range(2)]
    captured = []
    for state in states:
        with state.graph_capture(max_batch_size=2):
            captured.append(state.metadata_for_capture(2))
    gc.collect()
    plans = backend.plans_of(backend.plan_keys[0])
    for metadata in captured:
        backend.plan(metadata)
        (part,) = plans.step.parts
        assert part.run.__self__.buffers[0].data_ptr() == metadata.paged_kv_indptr.data_ptr()  # type: ignore[attr-defined]


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
    backend.impl("layers.0", scale=0.5)
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

    assert waits(builders[0].build) == ["wait for the stream", "record"]
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
