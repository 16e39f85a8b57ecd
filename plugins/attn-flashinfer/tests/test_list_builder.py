"""Steps of the list builder on the CPU, the stand-in in FlashInfer's place."""

from __future__ import annotations

import gc
from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from attncore.builder import (
    CommonMetadataBuilder,
    Sequence,
    SequenceGroup,
    metadata_from_fields,
)
from attncore.graphs import capturing, launch, new_graph
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.own_list_builder import CapturedListEngine, ListBuilderEngine
from attncore.testing.harness.errors import RefusedStepError


def test_steps_of_the_list_builder() -> None:
    engine = Engine(standin.backend())
    for name, context in (("p", 6), ("d", 5), ("e", 8)):
        engine.add(name, context + 8)
    engine.fill({"p": 6, "d": 5, "e": 8})
    engine.list_step({"p": 5}, {"d": 1, "e": 1}, hit=True)
    engine.list_step({}, {"p": 3, "d": 3})  # decodes of several tokens: no page lists
    engine.list_step({}, {"d": 1}, pad=2)


@pytest.mark.parametrize("chunked_prefill", [False, True])
def test_steps_that_its_own_list_builder_plans(chunked_prefill: bool) -> None:
    engine = ListBuilderEngine(standin.backend(), chunked_prefill=chunked_prefill)
    for name in "abc":
        engine.add(name, 24)
    engine.step({"a": 9, "b": 4})
    engine.step({"a": 1, "b": 1, "c": 3})
    for _ in range(5):
        engine.advance()
    engine.step({"b": 2 if chunked_prefill else 1, "a": 1})


def test_captured_sizes_of_its_own_list_builder() -> None:
    engine = CapturedListEngine(standin.backend())
    for _ in range(8):
        engine.change()
        engine.replayed()


def captured_pair(recorder: standin.Recorder) -> tuple[Any, Any, dict[int, Any]]:
    """A backend, its state with a captured size of two, and two steps of that size, of 15 pages and of 1 each."""
    backend = standin.backend(recorder)
    backend.impl("layers.0", scale=0.05)
    builder = backend.get_builder_cls()(4, max_seq_len_to_capture=64, backend=backend)
    state = backend.get_state_cls()(backend, builder)
    with state.graph_capture(2):
        state.metadata_for_capture(2)
    steps = {}
    for pages in (15, 1):
        rows = [Sequence(row, 1, 4 * pages - 1, list(range(1 + row * 15, 1 + row * 15 + pages))) for row in range(2)]
        steps[pages] = builder.build([SequenceGroup(False, rows)], 0)
    return backend, state, steps


def test_steps_that_came_from_another_process_are_replayed_by_their_own_plans() -> None:
    """All have the number 0."""
    recorder = standin.Recorder()
    backend, state, steps = captured_pair(recorder)
    received = {pages: metadata_from_fields(step.asdict_zerocopy(), backend) for pages, step in steps.items()}
    for metadata in received.values():
        backend.plan(metadata)
    for pages, metadata in received.items():
        state.prepare(metadata)
        state.begin_forward(metadata)
        assert recorder.of("fast_decode_plan")[-1]["indptr"].tolist() == [0, pages, 2 * pages]


def test_a_step_of_another_builder_is_not_replayed_by_a_plan_of_this_one() -> None:
    backend, state, _ = captured_pair(standin.Recorder())
    other = backend.get_builder_cls()(4, max_seq_len_to_capture=64, backend=backend)
    metadata = other.build([SequenceGroup(False, [Sequence(row, 1, 5, [1, 2]) for row in range(2)])], 0)
    state.prepare(metadata)
    with pytest.raises(ValueError, match="metadata: of another builder than this state"):
        state.begin_forward(metadata)


def test_a_captured_size_whose_plan_failed_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that fails may have written some of the plan."""
    recorder = standin.Recorder()
    backend, state, steps = captured_pair(recorder)
    state.prepare(steps[1])
    (size,) = backend.plans_of(backend.plan_keys[0])._captured.values()
    with monkeypatch.context() as patched:
        patched.setattr(type(size), "plan", lambda *_: [][0])
        with pytest.raises(IndexError):
            backend.plan(steps[15])
    before = len(recorder.of("fast_decode_plan"))
    state.begin_forward(steps[1])
    assert len(recorder.of("fast_decode_plan")) == before + 1


@pytest.mark.parametrize("make", [standin.backend, standin.latent_backend], ids=["plain", "latent"])
def test_a_step_of_a_captured_size_is_replayed_by_its_own_plan(make: Any) -> None:
    """Also where another step of the size was built since."""
    backend = make()
    impl, config = backend.impl("layers.0", scale=0.05), backend.config
    cache = backend.allocate_kv_cache(32)
    for view in backend.kv_cache_views(cache):
        view.normal_()
    builder = backend.get_builder_cls()(4, max_seq_len_to_capture=64, backend=backend)
    state = backend.get_state_cls()(backend, builder)
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    tensors = [torch.zeros(2, one, config.head_size, dtype=torch.bfloat16) for one in heads]
    with state.graph_capture(2):
        captured, graph = state.metadata_for_capture(2), new_graph("cpu")
        with capturing(graph):
            output = launch(impl.forward, *tensors, cache, captured)
    steps = {}
    for length, blocks in ((60, 15), (1, 1)):
        groups = [
            SequenceGroup(False, [Sequence(row, 1, length - 1, list(range(1 + row * 15, 1 + row * 15 + blocks)))])
            for row in range(2)
        ]
        steps[length] = builder.build(groups, 0), groups
    for metadata, groups in steps.values():
        state.prepare(metadata)
        state.begin_forward(metadata)
        for tensor in tensors:
            tensor.normal_()
        graph.replay()
        torch.testing.assert_close(output, impl.forward(*tensors, cache, builder.build(groups)), atol=3e-2, rtol=3e-2)
        with pytest.raises(ValueError, match="metadata: not of the step that was planned last"):
            impl.forward(*tensors, cache, next(one for one, _ in steps.values() if one is not metadata))


def test_windowed_prompts_of_the_list_builder_are_refused() -> None:
    engine = Engine(standin.backend(), sliding_window=5)
    engine.add("a", 12)
    with pytest.raises(RefusedStepError, match=r"^metadata: the list builder gives the early tokens of a windowed "):
        engine.list_step({"a": 11}, {})


def test_a_block_beyond_the_cache_is_refused() -> None:
    backend = standin.backend()
    backend.impl("layers.0", scale=0.5)
    backend.allocate_kv_cache(8)
    builder = CommonMetadataBuilder(4, "flashinfer", backend=backend)
    with pytest.raises(ValueError, match="metadata: block 8 is beyond the cache's num_blocks 8"):
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
        assert part.run.run.__self__.buffers[0].data_ptr() == captured.paged_kv_indptr.data_ptr()  # type: ignore[attr-defined]


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
        assert part.run.run.__self__.buffers[0].data_ptr() == metadata.paged_kv_indptr.data_ptr()  # type: ignore[attr-defined]
