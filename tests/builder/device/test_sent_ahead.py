"""Steps ahead that are built and replayed in one call each are those of the longer way; nodes are run by the host.

Random runs are in ``interpreted_ahead.py``.
"""

from pathlib import Path

import pytest
from builder.device import test_sent_fields as sent_fields
from builder.device.ahead_engine import Calls
from interrupted_calls import AtOpcode

from attncore import InputBatch, MetadataBuilder
from attncore.builder.device.by_copy import CopyTransport
from attncore.builder.device.transport import new_transport
from attncore.builder.persistent import assembly
from attncore.builder.persistent.steps_ahead import StepsAhead
from attncore.errors import AttncoreError
from attncore.kernels import load_kernels

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")

pytestmark = pytest.mark.skipif(load_kernels().IMPLEMENTATION != "cython", reason="numba's kernels serve no device")

BLOCK = 4


@pytest.fixture(autouse=True)
def nodes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    found = pytest.importorskip("nodes_on_host")
    monkeypatch.setattr(
        assembly, "new_transport", lambda name, *args: found.NodesOnHost(*args) if name == "graph" else None
    )


def two_requests(seen=True, **options):
    """Request a has 3 tokens and room for 5, b has 6 and room for 26; a graph of three rows. ``seen``: its warm-up
    reads every field.
    """
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=BLOCK)
    batch.add_request("a", [1, 2], 3)
    batch.add_request("b", range(3, 11), 6)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="graph", **options)
    calls = Calls(builder.capture(3))
    if seen:
        calls.replay()
        calls.take()
    else:
        calls.metadata.record()
    return batch, builder, calls


def state_of(batch, builder):
    state = batch._core.state
    counts = [batch.num_computed_tokens(name) for name in batch.req_ids]
    return counts, batch.req_ids, builder.last_step, state.busy, state.unfinished, [*batch._core.undo]


def ahead(builder, *args):
    return builder._sent_ahead.run_ahead(*args)


@pytest.mark.parametrize(
    "args",
    [
        (6, 3, None), (0, 3, None), (33, 3, None), (2.0, 3, None), (True, 3, None), (2, 4, None), (2, 1, None),
        (2, 3, {"a": 2}), (2, 3, {"c": 1}), (2, 3, {"a": -1}), (2, 3, {None: 1}), (2, 3, [("a", 0)]),
    ],
)  # fmt: skip
def test_what_is_not_plain_changes_nothing(args):
    batch, builder, calls = two_requests()
    builder.capture(1)
    before = state_of(batch, builder)
    assert ahead(builder, *args) is None
    assert state_of(batch, builder) == before
    with pytest.raises((ValueError, TypeError, LookupError, RuntimeError)):
        builder.run_ahead(args[0], bucket=args[1], scheduled={} if args[2] is None else args[2])
    assert state_of(batch, builder) == before
    steps = ahead(builder, 5, 3, None)
    steps.replay(calls)
    assert calls.take()[0]["decoder", "seq_lens"] == [4, 7, 0]


def test_a_request_that_is_not_in_the_batch_is_refused():
    _, builder, _ = two_requests()
    with pytest.raises(ValueError, match=r"^scheduled: 'c' is not in the batch"):
        builder.run_ahead(2, bucket=3, scheduled={"c": 1})


@pytest.mark.parametrize("scheduled", [None, {}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {"a": 1}, {"a": 0}])
def test_named_requests_run_or_rest(scheduled):
    batch, builder, calls = two_requests()
    steps = ahead(builder, 4, 3, scheduled)
    assert (builder.steps_ahead, steps.left) == (steps, 4)
    for _ in range(3):
        steps.replay(calls)
    rests = scheduled == {"a": 0}
    assert [batch.num_computed_tokens(name) for name in "ab"] == [3 if rests else 7, 10]
    assert steps.stop() == 3
    assert [batch.num_computed_tokens(name) for name in "ab"] == [3 if rests else 6, 9]
    found = [seen["decoder", "seq_lens"] for seen in calls.take()]
    assert found == ([[7, 0, 0], [8, 0, 0], [9, 0, 0]] if rests else [[4, 7, 0], [5, 8, 0], [6, 9, 0]])


def test_lengths_whose_sum_does_not_fit_are_left_to_the_longer_way():
    most = 2**30
    batch = InputBatch(max_num_reqs=2, max_model_len=most, block_size=most // 2)
    batch.add_request("a", [1, 2], most - 6)
    batch.add_request("b", [3, 4], most - 6)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="graph")
    builder.capture(2).record()
    assert ahead(builder, 6, 2, None) is None
    with pytest.raises(ValueError, match="does not fit int32"):
        builder.run_ahead(6, bucket=2)
    assert len(ahead(builder, 5, 2, None)) == 5


def test_a_failure_behind_the_build_takes_the_step_back(monkeypatch):
    batch, builder, calls = two_requests()
    before = state_of(batch, builder)

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepsAhead, "__init__", fails)
        with pytest.raises(KeyboardInterrupt):
            builder.run_ahead(3, bucket=3)
    assert state_of(batch, builder) == before
    assert builder.steps_ahead is None
    builder.build(bucket=3).replay(calls)  # no steps ahead are waited for
    assert calls.take()[0]["decoder", "seq_lens"] == [4, 7, 0]


def test_an_interrupted_call_has_happened_or_has_not():
    for count in range(0, 3000, 7):
        batch, builder, calls = two_requests()
        with AtOpcode(count) as interrupt:
            builder.run_ahead(3, bucket=3)
        built = builder.last_step == 1
        assert (builder.steps_ahead is not None) == built
        assert state_of(batch, builder)[0] == ([6, 9] if built else [3, 6])
        steps = builder.steps_ahead or builder.run_ahead(3, bucket=3)
        with AtOpcode(count) as second:
            steps.replay(calls)
        if not steps.launched:
            steps.replay(calls)
        assert steps.launched == 1
        with AtOpcode(count) as third:
            steps.stop()
        assert steps.stop() == 1
        assert builder.build().seq_lens.tolist() == [5, 8]
        if not (interrupt.fired or second.fired or third.fired):
            return
    pytest.fail("no call came to its end")


class Interrupted:
    """A graph whose replay is interrupted, before or behind its launch."""

    def __init__(self, calls, launches):
        self.calls, self.launches = calls, launches

    def replay(self):
        if self.launches:
            self.calls.replay()
        raise KeyboardInterrupt


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("done", [0, 1])
def test_a_replay_that_is_interrupted_is_not_launched_twice(done, launches):
    _, builder, calls = two_requests()
    steps = builder.run_ahead(3, bucket=3)
    for _ in range(done):
        steps.replay(calls)
    with pytest.raises(KeyboardInterrupt):
        steps.replay(Interrupted(calls, launches))
    while steps.left:
        steps.replay(calls)
    found = [seen["decoder", "seq_lens"] for seen in calls.take()]
    assert found == [[4, 7, 0], [5, 8, 0], [6, 9, 0]]


def test_a_field_that_is_first_asked_for_between_steps_ahead():
    """One that all of them have is sent then; of one that moves on, the host knows what the first of them had alone."""
    kept = "query_start_loc", "query_lens", "token_to_req_indices"
    moved = "seq_lens", "context_lens", "seq_start_loc", "paged_kv_indptr", "paged_kv_last_page_len"
    _, builder, calls = two_requests(False, backend=sent_fields.backend("block_table"))
    nodes_alone = Calls(calls.metadata)
    nodes_alone.replay = calls.metadata.record
    steps = builder.run_ahead(3, bucket=3)
    steps.replay(nodes_alone)
    assert steps.first.logits_indices.tolist() == [0, 1, 0]
    steps.replay(nodes_alone)
    for name in (*moved, "paged_kv_num_pages"):
        with pytest.raises(AttncoreError, match=r"^metadata: \w+ was not sent with step 1, and the device is steps"):
            getattr(steps.first, name)
    for name in kept:
        assert getattr(steps.first, name).tolist() == getattr(steps[1].host, name).tolist()
    steps.replay(nodes_alone)
    for name in kept:
        assert getattr(steps.first, name).tolist() == getattr(steps[2].host, name).tolist()
    metadata = builder.build()
    for name in (*kept, *moved):
        assert getattr(metadata, name).tolist() == getattr(metadata.host, name).tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_a_field_that_is_first_asked_for_between_steps_ahead_by_copies(monkeypatch, count):
    """On a CPU a step is sent with all fields, unless it is as on a device."""
    monkeypatch.setattr(assembly, "new_transport", new_transport)
    monkeypatch.setattr(CopyTransport, "send_with_all", lambda self: None)
    batch = InputBatch(max_num_reqs=4, max_model_len=32, block_size=BLOCK)
    batch.add_request("a", [1, 2], 3)
    batch.add_request("b", range(3, 11), 6)
    builder = MetadataBuilder(batch, sent_fields.backend("block_table"), max_num_batched_tokens=8, transport="copy")
    metadata = builder.capture(3)

    class Graph:
        def replay(self):
            for _ in range(count - 1):
                metadata.record_next()

    steps = builder.run_ahead(4, bucket=3)
    asked = steps.first.seq_start_loc  # what is kept of it for the steps that follow had not been sent
    assert asked.tolist() == [0, 4, 11, 11]
    for done in range(count, 5, count):
        steps.replay(Graph(), count)
        assert asked.tolist() == [0, 3 + done, 9 + 2 * done, 9 + 2 * done]
        if done > 1:
            with pytest.raises(AttncoreError, match=r"^metadata: seq_lens was not sent with step 1, and the device is"):
                steps.first.seq_lens  # noqa: B018


def test_a_graph_of_fewer_or_no_steps_is_refused():
    batch, builder, calls = two_requests()
    steps = builder.run_ahead(2, bucket=3)
    for graph, count, error, text in (
        (calls, 3, ValueError, "^count: 3 steps asked for, with 2 of 2 left"),
        (calls, 0, ValueError, "^count: 0"),
        (calls, 1.5, TypeError, "^count"),
        (7, 1, TypeError, "^graph: int has no replay"),
    ):
        with pytest.raises(error, match=text):
            steps.replay(graph, count)
    steps.replay(calls)
    batch.remove_request("b")
    with pytest.raises(RuntimeError, match=r"^replay: requests have left or blocks have moved"):
        steps.replay(calls)
    assert (steps.launched, steps.stop()) == (1, 1)
