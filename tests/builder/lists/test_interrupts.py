"""Calls of the list builder and of its captured states that are interrupted: fully done or not at all, and usable."""

import copy
import gc
import importlib
import itertools
import random
import signal

import numpy as np
import pytest
from interrupted_calls import AtOpcode, ByAlarm, Interrupt

from attncore import CommonAttentionMetadata, CommonMetadataBuilder, Sequence, SequenceGroup, graphs
from attncore.builder.lists import unfinished
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.builder.lists.captured_steps import NOTHING
from attncore.errors import CaptureError

# An alarm may come in a callback of the garbage collector, such as Hypothesis's, where Python swallows its exception.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

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


def prompts(context=0):
    """A prompt and a decode; with ``context``, the decodes of one token that they are afterwards."""
    first = Sequence(0, 1, context, [1, 2, 3]) if context else Sequence(0, 5, 0, [1, 2, 3])
    return [
        SequenceGroup(not context, [first], False),
        SequenceGroup(False, [Sequence(1, 1, 7 if context else 6, [4, 5, 6])], False),
    ]


STEPS = {"decodes": (groups(3, 7, 11), groups(4, 8, 12)), "prompts": (prompts(), prompts(5))}
READS = {
    "advanced": lambda metadata: metadata.advanced,
    "step": lambda metadata: metadata.step,
    "host": lambda metadata: metadata.host.seq_lens,
    "field": lambda metadata: metadata.seq_lens,
    "max_seq_len": lambda metadata: metadata.max_seq_len,
    "view": lambda metadata: metadata.decode_metadata,
    "class": lambda metadata: isinstance(metadata, type(metadata.source.builder).metadata_class),
    "copy": copy.copy,
    "repr": repr,
    "dict": vars,
}


class Own(CommonAttentionMetadata):
    """An engine's own."""


class OwnBuilder(CommonMetadataBuilder):
    metadata_class = Own


def raising(fails):
    """A plan that raises what ``fails`` holds, once."""

    def plan(metadata):
        if fails:
            raise fails.pop()

    return plan


def interrupt_again(monkeypatch, count):
    """Has the call that takes a step back interrupted too, before its opcode number ``count``. Returns those
    interrupts.
    """
    module, interrupts = importlib.import_module("attncore.builder.lists.advance_step"), []
    real = unfinished.settle

    def settle(metadata):
        if "_unfinished" not in object.__getattribute__(metadata, "__dict__"):
            return
        interrupts.append(AtOpcode(count))
        with interrupts[-1]:
            real(metadata)

    monkeypatch.setattr(module, "settle", settle)
    return interrupts


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", STEPS)
def test_an_advance_that_is_interrupted_twice_is_whole_for_whoever_reads_it(monkeypatch, kind, read):
    """A step of an engine's own class, interrupted in its plan, and again while it is taken back."""
    builder, (now, later) = OwnBuilder(4, "flashinfer"), STEPS[kind]
    expected = fields(builder.build(now)), fields(builder.build(later)) | {"advanced": 1}
    sampled, fails = np.arange(1, 1 + len(now)), []

    builder.plan = raising(fails)
    for count in itertools.count(step=5):
        with monkeypatch.context() as patch:
            interrupts = interrupt_again(patch, count)
            metadata, tokens = builder.build(now), np.zeros(len(sampled), np.int64)
            _ = metadata.seq_lens, metadata.slot_mapping
            fails.append(Interrupt())
            with pytest.raises(Interrupt):
                metadata.advance_step(tokens, sampled, turn_prefills_into_decodes=True)
        READS[read](metadata)
        assert type(metadata) is Own
        assert fields(metadata) == expected[0]
        assert not tokens.any()
        metadata.advance_step(tokens, sampled, turn_prefills_into_decodes=True)
        assert fields(metadata) == expected[1]
        assert metadata.seq_lens.tolist() == expected[1]["seq_lens"]
        if not interrupts[0].fired:
            break
    assert count > 50


class Slotted(CommonAttentionMetadata):
    """Its objects cannot be given another class."""

    __slots__ = ("engines",)


@pytest.mark.parametrize("kind", STEPS)
def test_an_advance_of_a_class_with_slots_is_taken_back(monkeypatch, kind):
    builder, (now, later) = new_builder(), STEPS[kind]
    builder.metadata_class = Slotted
    metadata, fails = builder.build(now), [Interrupt()]
    before, expected = fields(metadata), fields(builder.build(later)) | {"advanced": 1}
    builder.plan = raising(fails)
    for count in (10**6, 40):  # taken back at once, and by the next call
        fails[:] = [Interrupt()]
        with monkeypatch.context() as patch:
            interrupt_again(patch, count)
            with pytest.raises(Interrupt):
                metadata.advance_step(turn_prefills_into_decodes=True)
        if count == 10**6:
            assert fields(metadata) == before
    metadata.advance_step(turn_prefills_into_decodes=True)
    assert fields(metadata) == expected


@pytest.fixture
def answer_to_alarms():
    """That of before, behind the test: a later one may be of a command that answers alarms itself."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # drops one that has arrived
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer that signals")
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.usefixtures("answer_to_alarms")
def test_two_alarms_in_an_advance(kernels, kind):
    builder, (now, later) = CommonMetadataBuilder(4, "flashinfer", kernels=kernels), STEPS[kind]
    expected = fields(builder.build(now)), fields(builder.build(later)) | {"advanced": 1}
    for _ in range(20):  # compiled, where numba does so
        builder.build(now).advance_step(turn_prefills_into_decodes=True)
    draw, found = random.Random(1), set()
    for _ in range(2000):
        metadata = builder.build(now)
        with ByAlarm(draw.uniform(1e-6, 150e-6), [draw.uniform(1e-6, 60e-6)]):
            metadata.advance_step(turn_prefills_into_decodes=True)
        found.add(metadata.advanced)
        assert fields(metadata) == expected[metadata.advanced]
    assert found == {0, 1}


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_that_is_told_as_advanced_stays_so(kernels, kind):
    """Interrupted before each of the last opcodes of the call; another call of the builder changes nothing of it."""
    builder, (now, _) = CommonMetadataBuilder(4, "flashinfer", kernels=kernels), STEPS[kind]
    builder.build(now).advance_step(turn_prefills_into_decodes=True)
    metadata, whole = builder.build(now), AtOpcode(10**6)
    with whole:
        metadata.advance_step(turn_prefills_into_decodes=True)
    last, seen = 10**6 - whole.left, set()
    for count in range(last - 100, last):
        metadata = builder.build(now)
        with AtOpcode(count) as interrupt:
            metadata.advance_step(turn_prefills_into_decodes=True)
        assert interrupt.fired
        told = fields(metadata)
        builder.build(groups(1, 2))
        assert fields(metadata) == told
        seen.add(metadata.advanced)
    assert seen == {0, 1}


def test_the_metadata_of_a_captured_size_is_refused_where_the_buffers_hold_no_whole_step_of_it():
    builder = new_builder()
    state = CommonAttentionState(builder=builder)
    with state.graph_capture(4):
        captured = [state.metadata_for_capture(size) for size in (2, 4)]
    one, two = (builder.build(groups(*contexts), 0) for contexts in ((3, 7, 11, 8), (20, 21, 22, 23)))
    state.prepare(one)
    whole = [fields(captured[1])]
    state.prepare(two)
    whole.append(fields(captured[1]))
    refused = (
        r": .* a graph of 4 requests was captured over, but the buffers hold no whole step of this size .*; prepare a"
    )
    for call in (lambda: state.prepare(two), lambda: state.build(groups(20, 21, 22, 23), 0)):
        refusals = 0
        for count in itertools.count(step=3):
            state.prepare(one)
            with AtOpcode(count) as interrupt:
                call()
            found = fields(captured[1])
            if found not in whole or state._steps.prepared == NOTHING:
                refusals += 1
                with pytest.raises(CaptureError, match="^begin_forward" + refused):
                    state.begin_forward(captured[1])
                with pytest.raises(CaptureError, match="^prepare" + refused):
                    state.prepare(captured[1])
            else:
                state.begin_forward(captured[1])
            if not interrupt.fired:
                break
        assert refusals > 30
    with pytest.raises(CaptureError, match="captured over"):  # the buffers hold a step of another size
        state.begin_forward(captured[0])
    with state.graph_capture(4):
        assert state.metadata_for_capture(2) is captured[0]
    state.begin_forward(captured[0])
    assert state.prepare(captured[0]) is captured[0]


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
        unfinished.settle(metadata)
    assert fields(metadata) == before
    builder.advance_step(metadata)
    assert fields(metadata) == fields(new_builder().build(groups(4, 8, 12))) | {"advanced": 1}
