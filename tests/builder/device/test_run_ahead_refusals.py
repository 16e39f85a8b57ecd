"""What run_ahead refuses changes nothing; stop, interrupts and poison of steps ahead."""

import copy
import pickle

import numpy as np
import pytest
import torch
from builder.device.ahead_engine import Calls
from builder.device.arena_batches import CONFIG, Backend
from builder.plain_backend import config
from interrupted_calls import AtOpcode

from attncore import ATTNCORE_API, BackendSpec, MultipleOf
from attncore.builder import ContextParallel, InputBatch, KVCacheGroup, MetadataBuilder
from attncore.errors import AttncoreError, CaptureError


def two_requests(kernels=None, **options):
    """Request a has 3 tokens and room for 4, b has 6 and room for 26; a graph of two rows."""
    batch = InputBatch(max_num_reqs=3, max_model_len=32, block_size=4, num_blocks=20, kernels=kernels)
    batch.add_request("a", [1], 3)
    batch.append_blocks("a", [2])
    batch.add_request("b", range(3, 11), 6)
    options = {"max_num_batched_tokens": 8, "transport": "copy", "backend": None} | options
    builder = MetadataBuilder(batch, options.pop("backend"), **options)
    return batch, builder, Calls(builder.capture(3))


def state_of(batch, builder):
    return [batch.num_computed_tokens(name) for name in batch.req_ids], batch.req_ids, builder.last_step


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_steps": 6}, ValueError, r"^block_table: row 0 \(request 'a'\) holds 2 blocks but needs 3 for its"),
        ({"num_steps": 27, "scheduled": {"a": 0}}, ValueError, r"^scheduled: row 1 .* exceed max_model_len 32"),
        ({"num_steps": 0}, ValueError, "^num_steps: 0"),
        ({"num_steps": 33}, ValueError, "^num_steps: 33"),
        ({"num_steps": 2.5}, TypeError, "^num_steps: 2.5"),
        ({"bucket": 2}, CaptureError, "^bucket: 2 was not captured"),
        ({"bucket": 1}, ValueError, "^bucket: 1 row captured, but this step has 2"),
        ({"scheduled": {"a": 2}}, ValueError, "^scheduled: 2 tokens of 'a'; steps ahead run one token"),
        ({"scheduled": {"c": 0}}, ValueError, "^scheduled: 'c' is not in the batch"),
        ({"scheduled": [("a", 0)]}, TypeError, "^scheduled: .* is not a mapping"),
    ],
)
def test_a_refused_call_changes_nothing(kernels, arguments, error, text):
    batch, builder, calls = two_requests(kernels)
    builder.capture(1)
    before = state_of(batch, builder)
    with pytest.raises(error, match=text):
        builder.run_ahead(**{"num_steps": 2, "bucket": 3} | arguments)
    assert state_of(batch, builder) == before
    assert builder.steps_ahead is None
    builder.run_ahead(1, bucket=3).replay(calls)


@pytest.mark.parametrize("reason", ["span", "sum"])
def test_what_no_step_of_one_token_shows_is_refused_before_one_is_sent(kernels, reason):
    """The last step is on the device still, and its layers can run."""
    spec = BackendSpec(
        name="late", api=ATTNCORE_API, factory="nowhere:Backend", devices={"any": 1}, dtypes={"float32"},
        head_sizes={8}, block_sizes=MultipleOf(1), cuda_graph="always", pad_seq_len=1,
        features={"bidirectional_spans"},
    )  # fmt: skip
    size, longest = (4, 32) if reason == "span" else (2**28, 2**30)
    batch = InputBatch(max_num_reqs=4, max_model_len=longest, block_size=size, spans=True, kernels=kernels)
    builder = MetadataBuilder(batch, Backend(config(spec, size)), max_num_batched_tokens=8, transport="copy")
    builder.capture(4)
    for index, name in enumerate("ab"):
        batch.add_request(name, [8 * index + block for block in range(1, 1 + longest // size)], longest - 20)
    said = "^num_steps: 17, but then the sum of lengths does not fit int32"  # with that of the two padded rows
    if reason == "span":
        batch.set_spans("b", [(28, 31)])
        said = r"^run_ahead: request 'b' reaches its span \[28, 31\) within 17 steps"
    last, names = builder.build(query_len=2), ("seq_lens", "positions", "slot_mapping")
    with pytest.raises(ValueError, match=said):
        builder.run_ahead(17, bucket=4)
    assert builder.last_metadata is last
    assert [getattr(last, name).tolist() for name in names] == [getattr(last.host, name).tolist() for name in names]
    assert last.positions.tolist() == [*range(longest - 20, longest - 18)] * 2
    assert len(builder.run_ahead(14, bucket=4)) == 14


@pytest.mark.parametrize("replayed", [0, 1])
def test_stop_behind_swapped_rows(kernels, replayed):
    """Where nothing was replayed the build itself is taken back, and the rows must be those of before."""
    batch, builder, calls = two_requests(kernels)
    steps = builder.run_ahead(3, bucket=3)
    for _ in range(replayed):
        steps.replay(calls)
    batch.swap_rows(0, 1)
    if not replayed:
        with pytest.raises(CaptureError, match=r"^stop: .*; rows that were swapped are to be swapped back first$"):
            steps.stop()
        batch.swap_rows(0, 1)
    assert steps.stop() == replayed
    assert [batch.num_computed_tokens(name) for name in "ab"] == [3 + replayed, 6 + replayed]
    assert builder.build().context_lens.tolist() == ([6 + replayed, 3 + replayed] if replayed else [3, 6])


@pytest.mark.parametrize("asked", [{}, {"scheduled": {"a": 0}}, {"bucket": 2}, {"query_len": 2}])
def test_no_other_builder_builds_over_tokens_that_no_step_has_written(kernels, asked):
    """They count as computed, so that its step would read keys which are not in the cache."""
    batch, builder, calls = two_requests(kernels)
    other = MetadataBuilder(batch, max_num_batched_tokens=8)
    other.capture(2)
    steps = builder.run_ahead(3, bucket=3)
    for count in range(3):
        before = state_of(batch, other)
        with pytest.raises(CaptureError, match=rf"^build: {3 - count} of 3 steps ahead not replayed yet"):
            other.build(**asked)
        assert state_of(batch, other) == before
        steps.replay(calls)
    batch.rollback_many({"a": 2, "b": 2})
    assert other.build(**asked).context_lens[-1] == 7


@pytest.mark.parametrize("replayed", [0, 1])
def test_a_builder_that_is_closed_leaves_no_step_ahead(kernels, replayed):
    batch, builder, calls = two_requests(kernels)
    other = MetadataBuilder(batch, max_num_batched_tokens=8)
    steps = builder.run_ahead(3, bucket=3)
    for _ in range(replayed):
        steps.replay(calls)
    builder.close()
    assert steps.left == 0
    del builder, steps
    assert other.build().context_lens.tolist() == [3 + replayed, 6 + replayed]


def test_stop_takes_nothing_from_a_later_request_of_the_same_name(kernels):
    """It has as many computed tokens as the one that left would have."""
    batch, builder, _ = two_requests(kernels)
    steps = builder.run_ahead(3, bucket=3)
    batch.remove_request("a")
    batch.add_request("a", [11, 12], 6)
    before = state_of(batch, builder)
    with pytest.raises(CaptureError, match=r"^stop: request 'a' has changed since step 1 was built"):
        steps.stop()
    assert state_of(batch, builder) == before == ([6, 9], ("a", "b"), 1)


@pytest.mark.parametrize("replayed", [0, 1, 4])
def test_blocks_that_a_stopped_request_sees_are_not_released(kernels, replayed):
    """With all tokens counted as computed, the window would have passed blocks 3 and 4 as well."""
    group = KVCacheGroup("window", 2, sliding_window=4)
    batch = InputBatch(max_num_reqs=1, max_model_len=32, groups=[group], kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    batch.add_request("a", {"window": range(1, 10)}, 5)
    calls = Calls(builder.capture(1))
    steps = builder.run_ahead(6, bucket=1)
    for _ in range(replayed):
        steps.replay(calls)
    passed = (5 + replayed - 4 + 1) // 2
    assert batch.release_passed_blocks() == {"a": {"window": [*range(1, passed + 1)]}}
    assert steps.stop() == replayed
    assert batch.release_passed_blocks() == {}
    metadata = builder.build()
    first_seen = max(metadata.host.seq_lens[0] - 4, 0) // 2
    assert 0 not in metadata.host.block_table[0, first_seen : (metadata.host.seq_lens[0] + 1) // 2]


class PlansOnTheHost(Backend):
    def plan(self, metadata):
        pass


@pytest.mark.parametrize("groups", [None, [KVCacheGroup("window", 2, sliding_window=4)]])
def test_a_block_that_a_stopped_request_sees_is_not_made_null(kernels, groups):
    options = {"block_size": 2} if groups is None else {"groups": groups}
    batch = InputBatch(max_num_reqs=1, max_model_len=32, kernels=kernels, **options)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    calls = Calls(builder.capture(1))
    batch.add_request("a", [*range(1, 13)] if groups is None else {"window": [*range(1, 13)]}, 6)
    steps = builder.run_ahead(8, bucket=1)
    steps.replay(calls)
    needed = 3 if groups is None else 2  # the next token is the eighth: it is written to block 3, and sees block 2
    with pytest.raises(ValueError, match=rf"^block_id: 0, .* no window of request 'a' has passed block {needed}"):
        batch.replace_block("a", needed, 0)
    assert batch.replace_block("a", needed - 1, 0) == needed
    assert steps.stop() == 1
    assert builder.build().host.block_table[0, needed] == needed + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "auto"}, "steps are read where they are built"),
        ({"ticket": True}, "not with ticket=True"),
        ({"backend": PlansOnTheHost(CONFIG)}, "backend 'decoder' plans each step of a captured size on the host"),
        ({"context_parallel": ContextParallel(2, 0, 2, 1)}, "not with context_parallel"),
    ],
)
def test_a_builder_that_cannot_run_ahead_says_why(options, text):
    batch, builder, _ = two_requests(**options)
    before = state_of(batch, builder)
    with pytest.raises(ValueError, match=f"^run_ahead: .*{text}"):
        builder.run_ahead(2, bucket=3)
    assert state_of(batch, builder) == before


def test_a_size_of_drafts_does_not_run_ahead():
    _, builder, _ = two_requests(decode_threshold=2)
    builder.release(3)
    builder.capture(3, query_len=2)
    with pytest.raises(ValueError, match=r"^bucket: 3 rows captured with 2 tokens each; steps ahead run one"):
        builder.run_ahead(2, bucket=3)


def test_the_next_build_waits_for_the_last_replay():
    _, builder, calls = two_requests()
    steps = builder.run_ahead(3, bucket=3)
    for call in (builder.build, lambda: builder.run_ahead(1, bucket=3), lambda: builder.build_empty(3)):
        with pytest.raises(CaptureError, match=r"3 of 3 steps ahead not replayed yet; .* steps\.stop\(\)"):
            call()
    steps.replay(calls)
    with pytest.raises(ValueError, match=r"^count: 3 steps asked for, with 2 of 3 left"):
        steps.replay(calls, 3)
    with pytest.raises(TypeError, match=r"^graph: int has no replay"):
        steps.replay(3)
    steps.replay(calls)
    steps.replay(calls)
    assert [seen["decoder", "seq_lens"] for seen in calls.take()] == [[4, 7, 0], [5, 8, 0], [6, 9, 0]]
    assert builder.build().seq_lens.tolist() == [7, 10]


def test_stop_gives_back_what_did_not_run(kernels):
    batch, builder, calls = two_requests(kernels)
    steps = builder.run_ahead(4, bucket=3)
    steps.replay(calls)
    steps.replay(calls)
    batch.add_request("c", [15], 2)  # a new request arrives
    assert (steps.stop(), len(steps), steps.left) == (2, 2, 0)
    assert steps.stop() == 2
    assert state_of(batch, builder) == ([5, 8, 2], ("a", "b", "c"), 1)
    assert builder.build().seq_lens.tolist() == [6, 9, 3]


def test_a_graph_that_stops_the_steps_leaves_none():
    _, builder, _ = two_requests()
    steps = builder.run_ahead(4, bucket=3)

    class Stops:
        def replay(self):
            steps.stop()

    steps.replay(Stops())
    builder.build(bucket=3)


def test_stop_takes_back_a_step_that_was_not_replayed(kernels):
    batch, builder, calls = two_requests(kernels)
    before = state_of(batch, builder)
    steps = builder.run_ahead(4, bucket=3, scheduled={"a": 0})
    assert steps.first.moves
    assert (steps.stop(), len(steps)) == (0, 0)
    assert state_of(batch, builder) == before
    builder.build(bucket=3).replay(calls)
    assert calls.take()[-1]["decoder", "slot_mapping"] == [7, 18, -1]


def test_requests_that_left_or_were_rolled_back_have_their_own_tokens():
    batch, builder, calls = two_requests()
    steps = builder.run_ahead(4, bucket=3)
    steps.replay(calls)
    batch.rollback("b", 4)
    batch.remove_request("a")
    with pytest.raises(CaptureError, match=r"requests have left or blocks have moved .* call steps\.stop\(\)"):
        steps.replay(calls)
    batch.add_request("a", [11, 12], 6)  # another one of this name, as far as the steps would have gone
    assert steps.stop() == 1
    assert {name: batch.num_computed_tokens(name) for name in batch.req_ids} == {"a": 6, "b": 6}


def test_an_interrupted_call_has_happened_or_has_not():
    for count in range(0, 20_000, 23):
        batch, builder, calls = two_requests()
        with AtOpcode(count) as interrupt:
            builder.run_ahead(3, bucket=3)
        built = builder.last_step == 1
        assert (builder.steps_ahead is not None) == built
        assert state_of(batch, builder)[0] == ([6, 9] if built else [3, 6])
        steps = builder.steps_ahead or builder.run_ahead(3, bucket=3)
        steps.replay(calls)
        with AtOpcode(count) as second:
            steps.stop()
        assert state_of(batch, builder)[0] == ([6, 9] if steps.left else [4, 7])
        assert steps.stop() == 1
        assert builder.build().seq_lens.tolist() == [5, 8]
        if not interrupt.fired and not second.fired:
            return
    pytest.fail("no call came to its end")


def test_poison_knows_that_the_device_has_gone_on(monkeypatch):
    monkeypatch.setenv("ATTNCORE_POISON", "1")
    _, builder, calls = two_requests(depth=1)
    steps = builder.run_ahead(2, bucket=3)
    assert steps.first.seq_lens.tolist() == [4, 7, 0]
    steps.first.replay(calls)
    assert steps.first.seq_lens.tolist() == [4, 7, 0]
    steps.first.replay(calls)
    with pytest.raises(AttncoreError, match=r"step 1 was asked for 'seq_lens' on the device after"):
        _ = steps.first.seq_lens
    assert steps[1].seq_lens.tolist() == [5, 8, 0]
    builder.build()
    with pytest.raises(AttncoreError, match="step 1 was asked for after its arena was taken by a later one"):
        _ = steps[1]


def test_what_the_host_knows_of_a_step_is_asked_for_before_the_batch_changes():
    batch, builder, calls = two_requests()
    steps = builder.run_ahead(2, bucket=3)
    for _ in steps:
        steps.replay(calls)
    kept = steps[-1]
    with pytest.raises(IndexError, match=r"^index: 2, but these are 2 steps"):
        _ = steps[2]
    batch.remove_request("a")
    with pytest.raises(AttncoreError, match="ask for them before the batch changes"):
        _ = steps[0]
    assert kept.slot_mapping.tolist() == [8, 19, -1]
    assert not kept.host.slot_mapping.flags.writeable


def test_the_sampled_token_is_the_next_input():
    """A field of the engine's has what the host sent in the first step, and what the graph wrote to it behind."""
    batch = InputBatch(max_num_reqs=3, max_model_len=32, block_size=4)
    for name in range(2):
        batch.add_request(name, [1 + 2 * name, 2 + 2 * name], 3)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    builder.register_field("input_ids", np.int64, "token", lambda metadata, out: out.fill(40))
    metadata, seen = builder.capture(3), []
    ids = torch.as_tensor(metadata.input_ids)

    class Model:
        def replay(self):
            seen.append(ids.tolist())
            ids.add_(1)  # what it samples

    steps = builder.run_ahead(3, bucket=3)
    for _ in range(3):
        steps.replay(Model())
    builder.build(bucket=3).replay(Model())
    assert [one[:2] for one in seen] == [[40, 40], [41, 41], [42, 42], [40, 40]]


def test_steps_ahead_are_not_copied(kernels):
    _, builder, _ = two_requests(kernels)
    steps = builder.run_ahead(2, bucket=3)
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^StepsAhead: cannot be copied or pickled"):
            act(steps)
    assert steps.stop() == 0
