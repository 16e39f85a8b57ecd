"""CommonAttentionState: calls at a wrong moment and steps that no graph can run raise, and change no buffer."""

import pytest
from builder.lists.captured_state import decodes, made

import attncore
from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.builder.lists.graph_buffers import GraphBuffers
from attncore.errors import CaptureError
from attncore.graphs import StandInGraph, capturing
from attncore.reference import ReferenceBackend


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


def test_an_encoder_length_leaves_the_step_in_the_buffers(prepared):
    _, state = prepared
    groups = [*decodes([(5, [3, 4])]), SequenceGroup(False, [Sequence(0, 1, 5, [8, 9])], False, 3)]
    text = r"^groups\[1\].encoder_seq_len: given to a builder"
    refused(state, ValueError, text, state.build, groups, 2)
    refused(state, ValueError, text.replace("1", "0"), state.build, groups[1:], 3)


@pytest.mark.parametrize(
    ("block_size", "window", "text"),
    [
        (5, None, "metadata: of a builder with block_size 5, but the graphs have 4"),
        (4, 8, "metadata: of a builder with sliding_window 8, but the graphs have None"),
    ],
)
def test_steps_of_a_builder_with_other_settings(prepared, block_size, window, text):
    _, state = prepared
    other = CommonMetadataBuilder(block_size, "flashinfer", sliding_window=window, max_seq_len_to_capture=16)
    assert -(-16 // block_size) == 4
    refused(state, ValueError, text, state.prepare, other.build(decodes([(5, [3, 4])]), 0))


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
    with pytest.raises(CaptureError, match=r"metadata: padded to 1 request, which was not captured \(captured: none\)"):
        state.prepare(padded)
    chosen = attncore.select(
        num_heads=2, num_kv_heads=2, head_size=8, dtype="float32", host=attncore.Host.assume("cpu"), backend="reference"
    )
    with pytest.raises(ValueError, match="max_batch_size: reference cannot be captured in a graph"):
        CommonAttentionState(chosen.create()).graph_capture(2)


def test_no_pinned_memory_names_the_arguments_of_this_builder(monkeypatch):
    torch = pytest.importorskip("torch")
    zeros = torch.zeros

    def exhausted(*args, **kwargs):
        if "pin_memory" in kwargs:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*args, **kwargs)

    builder = CommonMetadataBuilder(4, max_seq_len_to_capture=16)
    monkeypatch.setattr(torch, "zeros", exhausted)
    with pytest.raises(MemoryError, match=r"pinned host memory .* lower max_batch_size or max_seq_len_to_capture"):
        GraphBuffers(builder, "meta", 4)


def test_the_builder_and_the_backend_of_a_state_do_not_change():
    """Buffers and graphs are of their sizes: a step of another builder would be cut off without an error."""
    builder, state = made()
    held = contents(state)
    for name, other in (("builder", CommonMetadataBuilder(4, max_seq_len_to_capture=4096)), ("backend", None)):
        with pytest.raises(AttributeError, match=name):
            setattr(state, name, other)
    assert state.builder is state.graph_clone(2).builder is builder
    assert contents(state) == held
