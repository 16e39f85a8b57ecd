"""Captured sizes of the persistent builder: what is refused, and that a refused call changes nothing."""

import dataclasses
from types import SimpleNamespace

import pytest
from builder.persistent.capture_builders import new_builder, spec
from builder.plain_backend import Plain, config
from core_state import core_state

from attncore import graphs
from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.errors import CaptureError


def state_of(batch, builder):
    memories = [memory.tobytes() for memory in builder._assembly.ring.memory]
    return core_state(batch), memories, builder.captured, builder.nbytes


class Planning(Plain):
    refuses = False

    def plan_layers(self, metadata, key):
        self.seen = metadata.paged_kv_indices.tolist(), metadata.decode_metadata.host.seq_lens.tolist()
        if self.refuses:
            raise RuntimeError("the workspace is too small")


def planning():
    backend = Planning(config())
    backend.impl("layer", scale=1.0)
    return backend


BAD_CAPTURES = [
    ("always", (9,), "num_reqs: 9 exceed the batch's max_num_reqs 8"),
    ("always", (8, 3), "num_reqs: 8 of 3 tokens exceed max_num_batched_tokens 20"),
    ("always", (2, 4), "query_len: 4 is above decode_threshold 3; graphs hold decodes only"),
    ("always", (0,), "num_reqs: 0 is below 1"),
    ("always", (2, 0), "query_len: 0 is below 1"),
    ("always", (2.0,), "num_reqs: 2.0 is not an integer"),
    ("always", (True,), "num_reqs: True is not an integer"),
    ("never", (2,), "num_reqs: backend 'plain' cannot be captured in a graph"),
    ("uniform_decode", (2, 2), "query_len: 2, but backend 'plain' captures decodes of one token only"),
    ("uniform", (4, 2), "query_len: the size of 4 requests was captured with 1 token each, not 2"),
]


@pytest.mark.parametrize(("level", "size", "message"), BAD_CAPTURES)
def test_bad_captures_name_themselves(kernels, level, size, message):
    batch, builder = new_builder(kernels, backend=Plain(config(spec(level))), max_tokens=20)
    batch.add_request("a", [1])
    if level != "never":
        builder.capture(4)
    before = state_of(batch, builder)
    with pytest.raises((ValueError, TypeError), match=message):
        builder.capture(*size)
    assert state_of(batch, builder) == before


def test_limits_are_read_only(kernels):
    batch, builder = new_builder(kernels, max_tokens=20)
    for owner, names in (
        (batch, ("max_num_reqs", "max_model_len", "max_encoder_len", "block_size", "groups")),
        (builder, ("max_num_batched_tokens", "max_num_encoder_tokens", "decode_threshold", "context_parallel")),
    ):
        for name in names:
            was = getattr(owner, name)
            with pytest.raises(AttributeError):
                setattr(owner, name, 10**6)
            assert getattr(owner, name) == was
    builder.batch = SimpleNamespace(max_num_reqs=100)
    with pytest.raises(ValueError, match="num_reqs: 9 exceed the batch's max_num_reqs 8"):
        builder.capture(9)
    with pytest.raises(ValueError, match="query_lens: 9 requests exceed max_num_reqs 8"):
        builder.build_profile([1] * 9)


def test_nothing_is_planned_or_copied_while_a_stream_captures(kernels):
    batch, builder = new_builder(kernels, backend=planning())
    batch.add_request("a", [1])
    builder.capture(2)
    before = state_of(batch, builder)
    calls = {
        "capture": lambda: builder.capture(2),
        "build": lambda: builder.build(bucket=2),
        "build_empty": lambda: builder.build_empty(2),
    }
    for what, call in (*calls.items(), ("build", builder.build)):
        with graphs.capturing(graphs.new_graph("cpu")), pytest.raises(CaptureError, match=f"{what}: a stream is captu"):
            call()
        assert state_of(batch, builder) == before
    assert builder.build(bucket=2).num_actual_reqs == 1


BAD_BUCKETS = [
    (3, {}, "bucket: 3 was not captured \\(captured: 2, 4\\); call builder.capture\\(3\\)"),
    (0, {}, "bucket: 0 is below 1"),
    ("2", {}, "bucket: '2' is not an integer"),
    (True, {}, "bucket: True is not an integer"),
    (2, {"a": 1, "b": 1, "c": 1}, "bucket: 2 rows captured, but this step has 3 requests; choose a larger one"),
    (2, {"b": 0, "c": 0, "a": 7}, r"bucket: 2 rows captured with 1 token each, but row 0 \(request 'a'\) runs 7"),
    (4, {"a": 2, "b": 2, "c": 1}, r"bucket: 4 rows captured with 2 tokens each, but row 2 \(request 'c'\) runs 1"),
    (4, {"a": 2, "b": 3, "c": 0}, r"with 2 tokens each, but row 1 \(request 'b'\) runs 3; schedule 2 of every request"),
]


@pytest.mark.parametrize(("bucket", "scheduled", "message"), BAD_BUCKETS)
def test_steps_that_do_not_fit_a_captured_size(kernels, bucket, scheduled, message):
    batch, builder = new_builder(kernels, backend=Plain(config(spec("uniform"))))
    for index, name in enumerate("abc"):
        batch.add_request(name, [2 * index + 1, 2 * index + 2])
    builder.capture(2)
    builder.capture(4, 2)
    builder.build()
    before = state_of(batch, builder)
    with pytest.raises((ValueError, TypeError, CaptureError), match=message):
        builder.build(scheduled, bucket=bucket)
    assert state_of(batch, builder) == before
    if bucket not in (2, 4):
        with pytest.raises((ValueError, TypeError, CaptureError), match=message):
            builder.build_empty(bucket)
    assert builder.build(query_len=2, bucket=4).num_actual_reqs == 3


def test_encoders_are_not_captured(kernels):
    groups = [KVCacheGroup("full", 4), KVCacheGroup("encoder", 4, cross=True)]
    batch, builder = new_builder(kernels, groups=groups, max_encoder_len=8)
    batch.add_request("a", {"full": [1], "encoder": []})
    batch.add_request("b", {"full": [2], "encoder": [3]}, encoder_seq_len=4)
    builder.capture(2)
    before = state_of(batch, builder)
    with pytest.raises(ValueError, match=r"bucket: 2 rows, and row 1 \(request 'b'\) runs its encoder tokens"):
        builder.build(bucket=2)
    assert state_of(batch, builder) == before
    builder.build()
    assert builder.build(bucket=2).groups["encoder"].seq_lens.tolist() == [0, 4]


def test_backends_that_pad_differently_share_no_lengths(kernels):
    groups = [KVCacheGroup("a", 4), KVCacheGroup("b", 4)]
    backends = {name: Plain(config(spec("always", pad_seq_len=pad))) for name, pad in (("a", 0), ("b", 1))}
    with pytest.raises(ValueError, match="backend: they state different pad_seq_len"):
        new_builder(kernels, groups=groups, backend=backends)


def test_the_least_of_the_levels_counts(kernels):
    groups = [KVCacheGroup("a", 4), KVCacheGroup("b", 4)]
    backends = {"a": Plain(config(spec("always"))), "b": Plain(config(spec("never")))}
    _, builder = new_builder(kernels, groups=groups, backend=backends)
    with pytest.raises(ValueError, match="num_reqs: backend 'plain' cannot be captured"):
        builder.capture(2)


@pytest.mark.parametrize("bucket", [None, 4])
def test_a_step_that_was_taken_back_leaves_no_views(kernels, bucket):
    """The next step has its number: what a plan looked at must not be found there again."""
    backend = planning()
    batch, builder = new_builder(kernels, backend=backend, depth=1)
    for index, name in enumerate("abc"):
        batch.add_request(name, [index + 1], index)
    builder.capture(4)
    backend.refuses = True
    with pytest.raises(RuntimeError, match="the workspace is too small"):
        builder.build(bucket=bucket)
    assert backend.seen[0] == [1, 2, 3]
    backend.refuses = False
    batch.replace_block("b", 0, 9)
    metadata = builder.build({"a": 0}, bucket=bucket)
    assert metadata.paged_kv_indices.tolist() == [3, 9]
    assert backend.seen[0] == [3, 9]
    assert backend.seen[1][:2] == metadata.decode_metadata.seq_lens.tolist()[:2] == [3, 2]
    assert (backend.seen[1] == [3, 2]) == (bucket is None)


# ---- sums over padded rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decodes", [True, False])
def test_padded_lengths_whose_sum_does_not_fit(kernels, decodes):
    """2**31 - 3 keys in two rows, and a padded row of one: with three of them the sum passes int32."""
    longest, block_size = 2**30, 2**20
    batch = InputBatch(max_num_reqs=8, max_model_len=longest, block_size=block_size, kernels=kernels)
    backend = Plain(dataclasses.replace(config(spec("always", pad_seq_len=1)), block_size=block_size))
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    blocks = list(range(1, 1025))
    batch.add_request("a", blocks, longest - 1)
    batch.add_request("b", blocks, longest - 4)
    builder.capture(3)
    builder.capture(8)
    if decodes:
        builder.build()
        batch.rollback_many({"a": 1, "b": 1})
    with pytest.raises(ValueError, match="bucket: 8 rows, the padded ones included, have lengths whose sum"):
        builder.build(bucket=8)
    assert batch.num_computed_tokens("a") == longest - 1
    assert builder.build(bucket=3).seq_start_loc.tolist() == [0, 2**30, 2**31 - 3, 2**31 - 2]


def test_padded_encoder_lengths_whose_sum_does_not_fit(kernels):
    longest = 2**30
    groups = [KVCacheGroup("full", 2**20), KVCacheGroup("encoder", 2**20, cross=True)]
    batch = InputBatch(max_num_reqs=8, max_model_len=8, groups=groups, max_encoder_len=longest, kernels=kernels)
    backend = Plain(dataclasses.replace(config(spec("always", pad_seq_len=1)), block_size=2**20))
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8, max_num_encoder_tokens=8)
    for name, length in (("a", longest), ("b", longest - 3)):
        blocks = {"full": [1], "encoder": list(range(1, 1025))}
        batch.add_request(name, blocks, encoder_seq_len=length, encoder_computed=True)
    builder.capture(3)
    builder.capture(8)
    builder.build()
    for _ in range(2):  # the second is a step whose rows need not be arranged
        with pytest.raises(ValueError, match="bucket: 8 rows, the padded ones included, have lengths whose sum"):
            builder.build(bucket=8)
        assert builder.build(bucket=3).groups["encoder"].seq_start_loc.tolist() == [0, 2**30, 2**31 - 3, 2**31 - 2]


def test_metadata_of_a_released_size_records_nothing(kernels):
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    metadata = builder.capture(2)
    builder.release(2)
    with pytest.raises(CaptureError, match="metadata: its size of 2 requests was not captured"):
        metadata.record()
    again = builder.capture(2)
    with pytest.raises(CaptureError, match="metadata: its size of 2 requests was released and captured again"):
        metadata.record()
    again.record()
