"""CommonAttentionState: stand-ins for graphs replay steps over its buffers correctly; calls at a wrong time raise."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import oracles
import pytest
import torch
from graph_engine import GraphEngine, expected_buffers

import attncore
from attncore import AttentionBackend, BackendConfig
from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    metadata_from_fields,
)
from attncore.builder.device.memory import aligned_bytes
from attncore.builder.first_generation_names import FirstGenerationStateNames
from attncore.builder.lists.attention_state import CommonAttentionState
from attncore.builder.lists.graph_buffers import GraphBuffers, _Arena
from attncore.errors import CaptureError
from attncore.graphs import StandInGraph, capturing, launch
from attncore.reference import ReferenceBackend

CASES = [
    {"layout": layout, "window": window} for layout in ("common", "flash", "flashinfer", "rocm") for window in (None, 6)
] + [{"layout": layout, "encoder": True} for layout in ("common", "flash", "rocm")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_replayed_steps_are_right(kernels, case):
    """Rows that grow, shrink, come and go; sizes in any order; blocks that were another's before."""
    engine = GraphEngine(5, kernels=kernels, **case)
    engine.capture()
    for step in range(24):
        engine.step(in_place=step % 3 == 0)
    engine.check_cache()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_replayed_steps_that_were_advanced(kernels, case):
    engine = GraphEngine(6, kernels=kernels, block_size=3, **case)
    engine.capture()
    for step in range(5):
        engine.advanced_steps(5)
        engine.step(in_place=step % 2 == 0)
    engine.check_cache()


def decodes(rows):
    return [SequenceGroup(False, [Sequence(i, 1, context, table)]) for i, (context, table) in enumerate(rows)]


class Plain:
    """What expected_buffers asks of an engine."""

    def __init__(self, layout, window=None, block_size=4, longest=30, sizes=(1, 2, 5)):
        self.layout, self.window, self.block_size, self.longest = layout, window, block_size, longest
        self.sizes, self.encoder = sizes, False


@pytest.mark.parametrize("layout", ["common", "flash", "flashinfer", "rocm"])
@pytest.mark.parametrize("window", [None, 7])
def test_numpy_arrays_without_a_backend(kernels, layout, window):
    one = Plain(layout, window)
    builder = CommonMetadataBuilder(
        4, layout, sliding_window=window, max_seq_len_to_capture=one.longest, kernels=kernels
    )
    state, read = CommonAttentionState(None, builder), {}
    with state.graph_capture(5):
        for size in one.sizes:
            metadata, graph = state.metadata_for_capture(size), StandInGraph()
            names = list(state.graph_input_buffers(metadata))
            with capturing(graph):
                copies = launch(lambda fields: tuple(map(np.copy, fields)), [getattr(metadata, name) for name in names])
            read[size] = graph, dict(zip(names, copies, strict=True))
    rng = np.random.default_rng(3)
    for step in range(60):
        rows = []
        for _ in range(rng.integers(1, 6)):
            context = int(rng.integers(0, 30))
            rows.append((context, rng.integers(0, 999, oracles.cdiv(context + 1, 4)).tolist(), None))
        groups, pad = decodes([row[:2] for row in rows]), state.pad_size(len(rows))
        if step % 2:
            metadata = state.build(groups, pad)
        else:
            metadata = builder.build(groups, pad)
            state.prepare(metadata)
        graph, found = read[metadata.num_reqs]
        graph.replay()
        assert {name: array.tolist() for name, array in found.items()} == expected_buffers(rows, one, metadata.num_reqs)


@pytest.mark.parametrize("window", [None, 5])
def test_the_reference_backend_over_the_buffers(kernels, window):
    """Replayed, and eagerly over a build without padding: the same output and the same cache."""
    backend = ReferenceBackend(BackendConfig(4, 2, 8, "float32", 4))
    impl = backend.impl("layer", scale=0.3, sliding_window=window)
    builder = CommonMetadataBuilder(
        4, sliding_window=window, max_seq_len_to_capture=32, backend=backend, kernels=kernels
    )
    state = CommonAttentionState(backend, builder)
    caches = [backend.allocate_kv_cache(32).normal_() for _ in range(2)]
    caches[1].copy_(caches[0])
    given, graphs = [torch.zeros(4, heads, 8) for heads in (4, 2, 2)], {}
    with state.graph_capture(4):
        for size in (4, 2):
            metadata, graph = state.metadata_for_capture(size), StandInGraph()
            with capturing(graph):
                graphs[size] = graph, launch(impl.forward, *(one[:size] for one in given), caches[0], metadata)
    caches[0].copy_(caches[1])  # the capture ran, once
    rng, numbers = np.random.default_rng(1), torch.Generator().manual_seed(1)
    for _ in range(30):
        ids, rows = rng.permutation(32).tolist(), []
        for _ in range(rng.integers(1, 5)):
            context = int(rng.integers(0, 32))
            rows.append((context, [ids.pop() for _ in range(oracles.cdiv(context + 1, 4))]))
        n, groups = len(rows), decodes(rows)
        fresh = [torch.randn(n, *one.shape[1:], generator=numbers) for one in given]
        for held, new in zip(given, fresh, strict=True):
            held[:n] = new
        metadata = builder.build(groups, state.pad_size(n))
        state.prepare(metadata)
        graph, output = graphs[metadata.num_reqs]
        graph.replay()
        expected = impl.forward(*fresh, caches[1], builder.build(groups))
        torch.testing.assert_close(output[:n], expected)
        torch.testing.assert_close(caches[0][:, :-1], caches[1][:, :-1])  # all but the sink


# ---- what is captured


def made(layout="common", capture=16, sizes=(1, 2, 4), backend=None, **options):
    """(builder, state) with these sizes captured."""
    builder = CommonMetadataBuilder(4, layout, max_seq_len_to_capture=capture, backend=backend, **options)
    state = CommonAttentionState(backend, builder)
    with state.graph_capture(max(sizes)):
        for size in sizes:
            state.metadata_for_capture(size)
    return builder, state


def test_metadata_to_capture_over(kernels):
    _, state = made("flashinfer", kernels=kernels)
    with state.graph_capture(4):
        metadata = state.metadata_for_capture(2)
    expected = {
        "slot_mapping": [-1, -1], "positions": [0, 0], "token_to_req_indices": [0, 1], "seq_lens": [1, 1],
        "seq_start_loc": [0, 1, 2], "context_lens": [0, 0], "query_lens": [0, 0], "logits_indices": [0, 0],
        "query_start_loc": [0, 0, 0], "block_table": [[0] * 4] * 2, "paged_kv_indptr": [0, 0, 0],
        "paged_kv_last_page_len": [0, 0], "paged_kv_indices": [0] * 16,
    }  # fmt: skip
    assert {name: getattr(metadata, name).tolist() for name in expected} == expected
    assert {name: getattr(metadata.host, name).tolist() for name in expected} == expected
    assert metadata.slot_mapping.dtype == np.int64
    assert metadata.block_table.dtype == np.int32
    found = metadata.max_query_len, metadata.max_seq_len, metadata.max_decode_seq_len, metadata.max_prefill_seq_len
    assert found == (1, 16, 16, 0)
    found = metadata.num_reqs, metadata.num_tokens, metadata.num_decodes, metadata.num_decode_tokens
    assert found == (2, 2, 2, 2)
    assert metadata.use_cuda_graph
    assert metadata.decode_metadata is metadata
    assert metadata.prefill_metadata is None
    with pytest.raises(ValueError, match="metadata: not as CommonMetadataBuilder"):
        metadata.advance_step()
    assert state.captured == (1, 2, 4)
    assert [state.pad_size(n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 0, -1]


def test_encoders_to_capture_over():
    _, state = made(encoder_decoder=True, max_encoder_seq_len_to_capture=9)
    with state.graph_capture(4):
        metadata = state.metadata_for_capture(2)
    assert metadata.encoder_seq_lens.tolist() == [1, 1]
    assert metadata.encoder_seq_start_loc.tolist() == [0, 1, 2]
    assert metadata.cross_block_table.tolist() == [[0, 0, 0]] * 2
    assert len(metadata.cross_slot_mapping) == 0
    assert metadata.max_encoder_seq_len == 9


def test_sizes_are_views_of_the_largest():
    _, state = made()
    with state.graph_capture(4):
        small, large = state.metadata_for_capture(2), state.metadata_for_capture(4)
    for name in state.graph_input_buffers(large):
        assert getattr(small, name).ctypes.data == getattr(large, name).ctypes.data, name
        assert getattr(small, name).flags.c_contiguous


def test_a_size_captured_again_is_the_same_and_padding_again():
    builder, state = made()
    held = state.prepare(builder.build(decodes([(5, [3, 4])]), 1))
    assert held.slot_mapping.tolist() == [17, -1]
    with state.graph_capture(4):
        again = state.metadata_for_capture(2)
    assert again is held
    assert again.slot_mapping.tolist() == [-1, -1]
    assert again.block_table.tolist() == [[0] * 4] * 2


def test_metadata_that_was_broadcast_is_prepared():
    builder, state = made("flashinfer")
    metadata = builder.build(decodes([(5, [3, 4])]), 1)
    state.prepare(metadata_from_fields(metadata.asdict_zerocopy()))
    assert state.graph_input_buffers(metadata)["slot_mapping"].tolist() == [17, -1]


def test_a_backends_tensors():
    backend = ReferenceBackend(BackendConfig(2, 2, 8, "float32", 4))
    builder, state = made(backend=backend)
    metadata = builder.build(decodes([(5, [3, 4])]), 1)
    buffers = state.graph_input_buffers(metadata)
    assert all(isinstance(one, torch.Tensor) for one in buffers.values())
    state.prepare(metadata)
    assert buffers["slot_mapping"].tolist() == [17, -1]
    assert buffers["slot_mapping"].dtype == torch.int64


# ---- clones, subclasses, names of the first generation


def test_a_clone_is_for_one_size_and_shares_the_buffers():
    builder, state = made()
    clone = state.graph_clone(2)
    assert clone.captured == (2,)
    assert [clone.pad_size(n) for n in (1, 2, 3)] == [1, 0, -1]
    metadata = builder.build(decodes([(5, [3, 4])]), 1)
    captured = clone.prepare(metadata)
    assert captured is state.prepare(metadata)
    state.begin_forward(metadata)  # either knows
    clone.begin_forward(metadata)
    with pytest.raises(CaptureError, match=r"metadata: padded to 4 requests, which was not captured \(captured: 2\)"):
        clone.prepare(builder.build(decodes([(5, [3, 4])]), 3))
    with pytest.raises(CaptureError, match=r"graph_clone: call it inside"):
        state.graph_clone(3)
    with state.graph_capture(4):
        early = state.graph_clone(3)
        with pytest.raises(CaptureError, match="metadata_for_capture: 4 requests, but this clone is for 3"):
            early.metadata_for_capture(4)
        early.metadata_for_capture(3)
    assert state.captured == (1, 2, 3, 4)


def test_a_clone_is_of_the_subclass():
    class State(attncore.AttentionState):
        def __init__(self, backend=None, builder=None):
            super().__init__(backend, builder)
            self.workspace = object()

    state = State(None, CommonMetadataBuilder(4, max_seq_len_to_capture=8))
    with state.graph_capture(2):
        clone = state.graph_clone(2)
    assert type(clone) is State
    assert clone.workspace is state.workspace


def test_the_default_of_every_backend():
    assert attncore.AttentionState is CommonAttentionState
    assert AttentionBackend.get_state_cls() is CommonAttentionState
    assert ReferenceBackend.get_state_cls() is CommonAttentionState
    program = "import sys, attncore; attncore.AttentionBackend; print('numpy' in sys.modules); attncore.AttentionState"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_names_of_the_first_generation():
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=8, encoder_decoder=True)
    state = CommonAttentionState(None, builder)
    with state.graph_capture(2):
        captured = state.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)
        with pytest.raises(ValueError, match="is_encoder_decoder_model: False, but the state's builder"):
            state.graph_capture_get_metadata_for_batch(2)
    group = SequenceGroup(False, [Sequence(0, 1, 5, [3, 4])], False, 6, [7, 8])
    metadata = builder.build([group], 1)
    buffers = state.get_graph_input_buffers(metadata, True)
    expected = {
        "slot_mapping": captured.slot_mapping, "seq_lens_tensor": captured.seq_lens,
        "block_tables": captured.block_table, "encoder_seq_lens_tensor": captured.encoder_seq_lens,
        "cross_block_tables": captured.cross_block_table,
    }  # fmt: skip
    assert buffers.keys() == expected.keys()
    assert all(buffers[name] is one for name, one in expected.items())
    state.prepare_graph_input_buffers(buffers | {"input_ids": None}, metadata, True)
    assert captured.cross_block_table.tolist() == [[7, 8], [0, 0]]
    assert captured.encoder_seq_lens.tolist() == [6, 1]
    with pytest.raises(ValueError, match="input_buffers: 'block_tables' is not what get_graph_input_buffers gives"):
        state.prepare_graph_input_buffers(buffers | {"block_tables": None}, metadata, True)
    plain = CommonAttentionState(None, CommonMetadataBuilder(4, max_seq_len_to_capture=8))
    with plain.graph_capture(1):
        metadata = plain.graph_capture_get_metadata_for_batch(1)
        assert plain.get_graph_input_buffers(metadata).keys() == {"slot_mapping", "seq_lens_tensor", "block_tables"}


# ---- the wrong moment, the wrong step


def contents(state):
    return {name: array.tolist() for name, array in state.graph_input_buffers(state._steps.metadata[4]).items()}


def refused(state, error, text, call, *arguments):
    """That a call is refused, and the buffers hold what they held."""
    before, prepared = contents(state), state._steps.prepared
    with pytest.raises(error, match=text):
        call(*arguments)
    assert contents(state) == before
    assert state._steps.prepared == prepared


@pytest.fixture
def prepared():
    """(builder, state) that hold a step."""
    builder, state = made("flashinfer")
    state.prepare(builder.build(decodes([(5, [3, 4]), (9, [5, 6, 7])]), 2))
    return builder, state


@pytest.mark.parametrize("way", ["prepare", "build"])
def test_steps_that_no_captured_graph_can_run(prepared, way):
    builder, state = prepared
    rows = decodes([(5, [3, 4])] * 3)

    def bring(groups, pad, builder=builder):
        if way == "build" and builder is state.builder:
            state.build(groups, pad)
        else:
            state.prepare(builder.build(groups, pad))

    text = r"metadata: padded to 3 requests, which was not captured \(captured: 1, 2, 4\); build with cuda_graph_pad"
    refused(state, CaptureError, text, bring, rows, 0)
    refused(state, CaptureError, "metadata: padded to 8 requests", bring, rows, 5)
    text = "max_seq_len_to_capture: 16 is below the length 17"
    refused(state, ValueError, text, bring, decodes([(16, [1] * 5)]), 0)
    refused(state, ValueError, r"groups\[0\]", bring, decodes([(16, [1])]), 0)
    refused(state, ValueError, "graph_batch_size", bring, [SequenceGroup(True, [Sequence(0, 2, 0, [1])])], 0)


def test_steps_built_otherwise(prepared):
    builder, state = prepared
    rows = decodes([(5, [3, 4])])
    eager = builder.build(rows)
    refused(
        state, ValueError, "metadata: not padded for a graph; build it with cuda_graph_pad_size", state.prepare, eager
    )
    longer = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=20).build(rows, 0)
    refused(state, ValueError, "metadata: a block_table 5 wide, but the graphs read 4", state.prepare, longer)
    other = CommonMetadataBuilder(4, max_seq_len_to_capture=16).build(rows, 0)
    refused(state, ValueError, "metadata: without paged_kv_indptr, unlike the graphs", state.prepare, other)
    near = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16).build(decodes([(15, [1] * 4)]), 0)
    near.max_decode_seq_len = 17
    refused(state, ValueError, "metadata: a length of 17 exceeds max_seq_len_to_capture 16", state.prepare, near)
    batch = InputBatch(max_num_reqs=1, max_model_len=8, block_size=4)
    batch.add_request("a", [1], num_computed_tokens=1)
    step = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    refused(state, ValueError, "metadata: not of CommonMetadataBuilder", state.prepare, step)
    state.begin_forward(step)  # which is none of its business


def test_decodes_of_several_tokens_run_without_a_graph():
    builder, state = made("flash")
    groups = [SequenceGroup(False, [Sequence(0, 3, 5, [3, 4])])]
    text = "metadata: 4 tokens in 2 rows; graphs hold decodes of one token"
    refused(state, ValueError, text, state.prepare, builder.build(groups, 1))
    refused(state, ValueError, text, state.build, groups, 1)


def test_more_pages_than_there_is_room_for():
    """A window caps lengths, but not page lists."""
    builder, state = made("flashinfer", sizes=(2, 4), capture=8, sliding_window=4)
    metadata = builder.build(decodes([(35, [1] * 9)]), 1)
    text = "metadata: 9 pages, but the graphs have room for 8"
    refused(state, ValueError, text, state.prepare, metadata)
    refused(state, ValueError, text, state.build, decodes([(35, [1] * 9)]), 1)
    state.prepare(builder.build(decodes([(31, [1] * 8)]), 1))


def test_encoders_where_the_graphs_have_none():
    _, state = made()
    group = SequenceGroup(False, [Sequence(0, 1, 5, [3, 4])], False, 6, [7, 8])
    metadata = CommonMetadataBuilder(4, max_seq_len_to_capture=16, encoder_decoder=True).build([group], 0)
    refused(state, ValueError, "metadata: with encoder_seq_lens, unlike the graphs", state.prepare, metadata)
    _, state = made(encoder_decoder=True, max_encoder_seq_len_to_capture=4)
    refused(state, ValueError, "metadata: a cross_block_table 4 wide, but the graphs read 1", state.prepare, metadata)


def test_captures_at_the_wrong_moment():
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=16)
    state = CommonAttentionState(None, builder)
    with pytest.raises(CaptureError, match="metadata_for_capture: call it inside"):
        state.metadata_for_capture(1)
    with pytest.raises(CaptureError, match="graph_clone: call it inside"):
        state.graph_clone(1)
    with state.graph_capture(2):
        with pytest.raises(CaptureError, match="graph_capture: open already"):
            with state.graph_capture(2):
                pass
        with pytest.raises(CaptureError, match="metadata_for_capture: 3 requests exceed the 2 of graph_capture"):
            state.metadata_for_capture(3)
        state.metadata_for_capture(2)
        with capturing(StandInGraph()):
            with pytest.raises(CaptureError, match="metadata_for_capture: a stream is capturing"):
                state.metadata_for_capture(2)
    with pytest.raises(CaptureError, match="metadata_for_capture: call it inside"):
        state.metadata_for_capture(2)
    assert state.captured == (2,)
    with state.graph_capture(1):  # more sizes of the same buffers
        state.metadata_for_capture(1)
    with pytest.raises(
        CaptureError, match="graph_capture: 3 requests, but the graphs captured so far read buffers of 2"
    ):
        with state.graph_capture(3):
            pass
    with state.graph_capture(2):  # and the state is as good as before
        state.metadata_for_capture(2)


def test_a_capture_that_fails_closes():
    state = CommonAttentionState(None, CommonMetadataBuilder(4, max_seq_len_to_capture=16))

    def fails():
        with state.graph_capture(1):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with state.graph_capture(3):  # nothing was captured: larger buffers do no harm
        state.metadata_for_capture(3)


def test_preparing_and_building_while_a_graph_is_captured(prepared):
    builder, state = prepared
    metadata = builder.build(decodes([(5, [3, 4])]), 0)
    with capturing(StandInGraph()):
        refused(state, CaptureError, "prepare: a stream is capturing", state.prepare, metadata)
        refused(state, CaptureError, "build: a stream is capturing", state.build, decodes([(5, [3, 4])]), 0)
        with pytest.raises(CaptureError, match="graph_capture: a stream is capturing"):
            with state.graph_capture(1):
                pass
    state.prepare(metadata)


def test_a_step_must_be_prepared_before_it_runs(prepared):
    builder, state = prepared
    state.begin_forward(None)
    state.begin_forward(builder.build(decodes([(5, [3, 4])])))  # eager
    first, second = (builder.build(decodes([(5, [3, 4, 5])]), 1) for _ in range(2))
    with pytest.raises(CaptureError, match="begin_forward: this step is padded for a graph, but the buffers do not"):
        state.begin_forward(first)
    state.prepare(first)
    state.begin_forward(first)
    state.prepare(second)
    with pytest.raises(CaptureError, match="begin_forward: this step is padded"):
        state.begin_forward(first)
    second.advance_step()
    with pytest.raises(CaptureError, match="begin_forward: this step is padded"):
        state.begin_forward(second)
    state.prepare(second)
    state.begin_forward(second)
    with pytest.raises(CaptureError, match="metadata: padded to 3 requests, which was not captured"):
        state.begin_forward(builder.build(decodes([(5, [3, 4])]), 2))


def test_metadata_built_in_place_does_not_advance(prepared):
    _, state = prepared
    metadata = state.build(decodes([(5, [3, 4])]), 1)
    state.begin_forward(metadata)
    with pytest.raises(ValueError, match="metadata: not as CommonMetadataBuilder"):
        metadata.advance_step()
    assert not state.build(decodes([(5, [3, 4])]), -1).use_cuda_graph


class Planning(ReferenceBackend):
    def plan(self, metadata):
        self.planned.append((metadata, metadata.host.seq_lens.tolist()))
        if self.fails:
            raise RuntimeError("no workspace")


@pytest.fixture
def planning():
    backend = Planning(BackendConfig(2, 2, 8, "float32", 4))
    backend.planned, backend.fails = [], False
    return backend


def test_captured_sizes_are_planned_and_steps_are(planning):
    builder, state = made(backend=planning, sizes=(2,))
    captured = state._steps.metadata[2]
    assert planning.planned == [(captured, [1, 1])]
    for way in (state.build, builder.build):
        metadata = way(decodes([(5, [3, 4])]), 1)
        state.prepare(metadata)
        assert planning.planned[-1] == (metadata, [6, 1])
    assert len(planning.planned) == 3
    planning.fails = True
    with state.graph_capture(2):
        with pytest.raises(RuntimeError, match="no workspace"):
            state.metadata_for_capture(1)
    assert state.captured == (2,)


def test_no_plan_while_a_graph_is_captured(planning):
    builder = CommonMetadataBuilder(4, backend=planning)
    metadata = builder.build(decodes([(5, [3, 4])]))
    with capturing(StandInGraph()):
        with pytest.raises(CaptureError, match="plan: a stream is capturing"):
            builder.build(decodes([(5, [3, 4])]))
        CommonMetadataBuilder(4).build(decodes([(5, [3, 4])]))  # nothing to plan
    assert [one for one, _ in planning.planned] == [metadata]


def test_bad_arguments_name_themselves():
    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=16)
    state = CommonAttentionState(None, builder)
    for value, error in ((0, ValueError), (True, TypeError), (2.0, TypeError), (2**31, ValueError)):
        with pytest.raises(error, match="max_batch_size: "):
            state.graph_capture(value)
        with pytest.raises(error, match="batch_size: "):
            state.metadata_for_capture(value)
        with pytest.raises(error, match="batch_size: "):
            state.graph_clone(value)
        with pytest.raises(error, match="num_reqs: "):
            state.pad_size(value)
    with pytest.raises(TypeError, match=r"cuda_graph_pad_size: 0\.5 is not an integer"):
        state.build(decodes([(5, [3, 4])]), 0.5)
    with pytest.raises(ValueError, match="builder: made without max_seq_len_to_capture"):
        CommonAttentionState(None, CommonMetadataBuilder(4)).graph_capture(1)
    with pytest.raises(ValueError, match="builder: made for another backend"):
        CommonAttentionState(ReferenceBackend(BackendConfig(2, 2, 8, "float32", 4)), builder)


def test_without_a_builder_there_are_no_buffers():
    state = CommonAttentionState(ReferenceBackend(BackendConfig(2, 2, 8, "float32", 4)))
    with state.graph_capture(2):
        with pytest.raises(ValueError, match="metadata_for_capture: this state has no builder"):
            state.metadata_for_capture(2)
    with pytest.raises(ValueError, match="build: this state has no builder"):
        state.build(decodes([(5, [3, 4])]), 0)
    padded = CommonMetadataBuilder(4, max_seq_len_to_capture=16).build(decodes([(5, [3, 4])]), 0)
    with pytest.raises(
        CaptureError, match=r"metadata: padded to 1 requests, which was not captured \(captured: none\)"
    ):
        state.prepare(padded)
    chosen = attncore.select(
        num_heads=2, num_kv_heads=2, head_size=8, dtype="float32", host=attncore.Host.assume("cpu"), backend="reference"
    )
    with pytest.raises(ValueError, match="max_batch_size: reference cannot be captured in a graph"):
        CommonAttentionState(chosen.create()).graph_capture(2)


# ---- the way to a device, on a CPU


class Event:
    """A copy that is still under way when it is asked about, and over once it was waited for."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


class Staged(GraphBuffers):
    """Two staging blocks before one 'device' block, all in host memory; copies arrive when ``arrive`` is called."""

    def _allocate(self, device):
        self._device, self.sent, self.events = torch.zeros(self.nbytes, dtype=torch.uint8), [], {}
        arenas = []
        for index in range(2):
            arenas.append(_Arena(aligned_bytes(self.nbytes), index))
            arenas[-1].tensor = torch.from_numpy(arenas[-1].memory)
            vars(self._host(arenas[-1], self.max_batch_size))["token_to_req_indices"][:] = np.arange(
                self.max_batch_size
            )
        return arenas

    def _record(self, arena):
        self.events.setdefault(arena.index, Event())
        self.sent.append(arena)

    def _wait_for(self, arena):
        if arena.index in self.events:
            self.events[arena.index].synchronize()


def test_staging_blocks_take_turns_and_are_waited_for():
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16)
    buffers, one = Staged(builder, "cpu", 4), Plain("flashinfer", longest=16, sizes=(4,))
    views, rng = buffers.views(4), np.random.default_rng(2)
    for step in range(12):
        rows = []
        for _ in range(rng.integers(1, 5)):
            context = int(rng.integers(0, 16))
            rows.append((context, rng.integers(0, 99, oracles.cdiv(context + 1, 4)).tolist(), None))
        metadata = builder.build(decodes([row[:2] for row in rows]), 4 - len(rows))
        host = buffers.write(metadata.host, 4)
        expected = expected_buffers(rows, one, 4)
        assert {name: views[name].tolist() for name in buffers.names} == expected
        assert {name: getattr(host, name).tolist() for name in buffers.names} == expected
        assert buffers.sent[-1] is buffers._arenas[step % 2]
        assert sum(event.waited for event in buffers.events.values()) == max(0, step - 1)


# ---- the documents

DOCS = pathlib.Path(__file__).parents[3] / "docs"


def test_the_snippets_of_the_page_run():
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", (DOCS / "list-builder-graphs.md").read_text(), re.DOTALL):
        exec(compile(snippet, "docs/list-builder-graphs.md", "exec"), names)
    assert names["state"].captured == (1, 2, 4, 8)


def test_the_contract_names_every_member_of_the_state():
    section = (DOCS / "contract.md").read_text().partition("### The state")[2].partition("## Versions")[0]
    table, _, aliases = section.partition("names of the first generation too:")
    members = {name for name in dir(CommonAttentionState) if not name.startswith("_")}
    first = {name for name in vars(FirstGenerationStateNames) if not name.startswith("_")}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == members - first
    assert first <= set(re.findall(r"`(\w+)`", aliases))
