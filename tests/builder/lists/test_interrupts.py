"""Calls of the list builder and of its captured states that are interrupted: fully done or not at all, and usable."""

import gc
import importlib

import numpy as np
import pytest
from interrupted_calls import AtOpcode, Interrupt

from attncore import CommonMetadataBuilder, Sequence, SequenceGroup, graphs
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.errors import CaptureError

FIELDS = ("context_lens", "positions", "slot_mapping", "seq_lens", "seq_start_loc", "block_table", "query_start_loc",
          "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")  # fmt: skip


def groups(*contexts):
    tables = [[10 * row + k for k in range(1, 9)] for row in range(len(contexts))]
    return [
        SequenceGroup(False, [Sequence(row, 1, context, tables[row])], False) for row, context in enumerate(contexts)
    ]


def new_builder(**options):
    return CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=32, **options)


def fields(metadata):
    host = metadata.host
    found = {name: np.array(getattr(host, name)).tolist() for name in FIELDS if hasattr(host, name)}
    return found | {"max_seq_len": metadata.max_seq_len, "advanced": metadata.advanced}


def interrupt_all(call, look, *, step=1):
    """Interrupts ``call`` at every opcode in turn until it is not; ``look(happened)`` is called after each."""
    count = 0
    while True:
        interrupt = AtOpcode(count)
        with interrupt:
            call()
        look(not interrupt.fired)
        if not interrupt.fired:
            return count
        count += step


@pytest.mark.parametrize("window", [None, 6])
def test_advance_step(window):
    metadata = new_builder(sliding_window=window).build(groups(3, 7, 11, 8))
    expected = new_builder(sliding_window=window).build(groups(4, 8, 12, 9))
    _ = metadata.block_table, metadata.decode_metadata
    before, tokens = fields(metadata), np.zeros(4, np.int64)
    builder, sampled = metadata.source.builder, np.arange(1, 5)

    def look(happened):
        if metadata.advanced:  # interrupted behind the last change
            assert fields(metadata) == fields(expected) | {"advanced": 1}
            assert tokens.tolist() == [1, 2, 3, 4]
        else:
            assert not happened
            assert fields(metadata) == before

    def advance():
        if not metadata.advanced:
            builder.advance_step(metadata, tokens, sampled)

    assert interrupt_all(advance, look, step=3) > 300


def test_build(kernels):
    """The builder is free after an interrupted build, and gives what it gave before."""
    builder = new_builder(kernels=kernels)
    expected = fields(builder.build(groups(3, 7, 11)))
    interrupt_all(lambda: builder.build(groups(1, 2)), lambda happened: None, step=5)
    assert fields(builder.build(groups(3, 7, 11))) == expected


def test_prepare_and_build_into_buffers():
    """A step that was not prepared is refused; the next one is there whole, without pages of the interrupted one."""
    builder = new_builder()
    state = CommonAttentionState(builder=builder)
    with state.graph_capture(4):
        captured = state.metadata_for_capture(4)
    long, short = builder.build(groups(20, 24, 28), 1), builder.build(groups(1, 2), 2)
    expected = fields(short)
    for call in (lambda: state.prepare(long), lambda: state.build(groups(20, 24, 28), 1)):
        for count in range(5, 20_000, 7):
            with AtOpcode(count) as interrupt:
                call()
            if not interrupt.fired:
                break
            assert state.prepare(short) is captured
            state.begin_forward(short)
            host = captured.host
            assert host.seq_lens.tolist() == expected["seq_lens"]
            assert host.paged_kv_indptr.tolist() == expected["paged_kv_indptr"]
            pages = expected["paged_kv_indices"]
            assert host.paged_kv_indices.tolist() == pages + [0] * (len(host.paged_kv_indices) - len(pages))


def test_graph_capture_and_capturing_are_closed():
    state, collects = CommonAttentionState(builder=new_builder()), gc.isenabled()

    def capture():
        with state.graph_capture(2):
            state.metadata_for_capture(2)
        with graphs.capturing(graphs.StandInGraph()):
            pass

    def look(happened):
        assert state._steps.limit == 0
        assert not graphs.is_capturing("cpu")
        assert gc.isenabled() == collects

    assert interrupt_all(capture, look, step=9) > 200


def test_graph_capture_that_is_interrupted_anywhere_can_be_opened_again():
    state, inner = CommonAttentionState(builder=new_builder()), []

    def capture():
        with state.graph_capture(2):
            inner.append(state._steps.limit)

    def look(happened):
        with state.graph_capture(3 if happened else 2):
            assert state._steps.limit
            with pytest.raises(CaptureError, match=r"^graph_capture: open already"), state.graph_capture(2):
                pass
            assert state._steps.limit
        assert state._steps.limit == 0

    assert interrupt_all(capture, look) > 30
    assert set(inner) == {2}
    unused = state.graph_capture(3)
    opened = state.graph_capture(3)
    opened.__enter__()
    assert state._steps.limit == 3
    del unused, opened  # as where an interrupt comes before the exit
    assert state._steps.limit == 0


def test_garbage_is_collected_again_where_the_call_that_stopped_it_is_interrupted(monkeypatch):
    def disable():
        disable_now()
        raise Interrupt

    disable_now = gc.disable
    monkeypatch.setattr(gc, "disable", disable)
    with pytest.raises(Interrupt), graphs.uncollected():
        pass
    assert gc.isenabled()


def test_an_interrupt_inside_the_roll_back_is_made_good_by_the_next_call():
    metadata = new_builder().build(groups(3, 7, 11))
    builder = metadata.source.builder
    before = fields(metadata)

    module = importlib.import_module("attncore.builder.lists.advanced_arrays")

    real, calls = module._update_views, []

    def update_views(*args, **kwargs):
        calls.append(args)
        if len(calls) < 3:
            raise Interrupt
        real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_update_views", update_views)
        with pytest.raises(Interrupt):  # of the advance, and again of its roll-back
            builder.advance_step(metadata)
        module.settle(metadata)
    assert fields(metadata) == before
    builder.advance_step(metadata)
    assert fields(metadata) == fields(new_builder().build(groups(4, 8, 12))) | {"advanced": 1}
