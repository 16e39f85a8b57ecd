"""Captured sizes of tokens: rows of any lengths, prompts and chunks of them beside decodes, in one graph."""

import random

import numpy as np
import pytest
from builder.persistent.capture_builders import MAX_LEN, MAX_REQS, new_builder, spec
from builder.plain_backend import BLOCK, Plain, config
from core_state import core_state

from attncore.builder import ContextParallel, InputBatch, KVCacheGroup, MetadataBuilder, StateGroup
from attncore.errors import CaptureError

OF_TOKENS = ("slot_mapping", "positions", "token_to_req_indices")
OF_ROWS = ("seq_lens", "context_lens", "query_lens", "logits_indices", "paged_kv_last_page_len")
STARTS = ("query_start_loc", "seq_start_loc", "paged_kv_indptr")


def builder_of(kernels, **settings):
    return new_builder(kernels, backend=Plain(config(spec("always"))), **settings)


def test_a_prompt_a_chunk_and_a_decode(kernels):
    batch, builder = builder_of(kernels)
    for name, (blocks, computed) in {"a": ([4, 6], 4), "b": ([9, 2, 7], 5), "c": ([5], 0)}.items():
        batch.add_request(name, blocks, computed)
    captured = builder.capture(4, num_tokens=10)
    assert (captured.num_reqs, captured.num_tokens, captured.max_query_len) == (4, 10, 10)
    metadata = builder.build({"a": 1, "b": 4, "c": 2}, bucket=(4, 10))
    assert metadata.slot_mapping.tolist() == [24, 20, 21, 9, 10, 11, 28, -1, -1, -1]
    assert metadata.positions.tolist() == [4, 0, 1, 5, 6, 7, 8, 0, 0, 0]
    assert metadata.token_to_req_indices.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert metadata.query_start_loc.tolist() == [0, 1, 3, 7, 7]
    assert metadata.seq_lens.tolist() == [5, 2, 9, 0]
    assert metadata.seq_start_loc.tolist() == [0, 5, 7, 16, 16]
    assert metadata.logits_indices.tolist() == [0, 2, 6, 0]
    assert (metadata.num_reqs, metadata.num_actual_reqs, metadata.num_actual_tokens) == (4, 3, 7)
    assert (metadata.num_prefills, metadata.num_prefill_tokens, metadata.num_decode_tokens) == (0, 0, 10)
    assert (metadata.max_query_len, metadata.max_seq_len, metadata.use_cuda_graph) == (10, 9, True)
    assert metadata.prefill_metadata is None


def test_both_kinds_of_sizes_live_side_by_side(kernels):
    batch, builder = builder_of(kernels)
    batch.add_request("a", [3, 4])
    for size in (4, 2):
        builder.capture(size)
        builder.capture(size, num_tokens=8)
    assert builder.captured == (2, 4, (2, 8), (4, 8))
    assert builder.build({"a": 5}, bucket=(2, 8)).num_tokens == 8
    assert builder.build(bucket=2).num_tokens == 2
    assert builder.build_empty((4, 8)).num_actual_reqs == 0
    assert builder.capture(2, num_tokens=8).num_tokens == 8  # captured again: the same size
    builder.release((2, 8))
    assert builder.captured == (2, 4, (4, 8))
    with pytest.raises(CaptureError, match=r"bucket: \(2, 8\) was not captured .*capture\(2, num_tokens=8\)"):
        builder.build(bucket=(2, 8))
    assert builder.build(bucket=2).seq_lens.tolist() == [7, 0]


def test_the_metadata_of_a_released_size_names_it(kernels):
    _, builder = builder_of(kernels)
    captured = builder.capture(2, num_tokens=8)
    builder.release((2, 8))
    with pytest.raises(CaptureError, match=r"8 tokens was not captured; builder\.capture\(2, num_tokens=8\) gives"):
        captured.record()
    builder.capture(2, num_tokens=8)
    with pytest.raises(CaptureError, match="was released and captured again"):
        captured.record()


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_are_those_without_a_graph_padded(kernels, seed):
    """Arrays and counts beside an eager builder of the same batch's twin, and fixed addresses."""
    draw = random.Random(seed)
    (batch, builder), (twin, eager) = (builder_of(kernels, max_tokens=64) for _ in range(2))
    sizes = [(MAX_REQS, 64), (MAX_REQS, 24), (3, 24)]
    addresses = {}
    for rows, tokens in sizes:
        captured = builder.capture(rows, num_tokens=tokens)
        addresses[rows, tokens] = {name: getattr(captured, name).ctypes.data for name in OF_TOKENS + OF_ROWS}
    blocks, names = iter(range(1, 10**6)), iter(range(10**6))
    for _ in range(60):
        for name in [name for name in batch.req_ids if draw.random() < 0.2]:
            batch.remove_request(name)
            twin.remove_request(name)
        while len(batch) < MAX_REQS and draw.random() < 0.6:
            name, ids = next(names), [next(blocks) % 60 + 1 for _ in range(MAX_LEN // BLOCK)]
            batch.add_request(name, ids)
            twin.add_request(name, ids)
        rows, tokens = size = draw.choice(sizes)
        chosen = draw.sample(list(batch.req_ids), min(len(batch), draw.randint(0, rows)))
        scheduled, room = dict.fromkeys(batch.req_ids, 0), tokens
        for name in chosen:
            left = MAX_LEN - batch.num_computed_tokens(name)
            if room and left:
                scheduled[name] = draw.randint(1, min(room, left, draw.choice((1, 4, MAX_LEN))))
                room -= scheduled[name]
        padded, plain = builder.build(scheduled, bucket=size), eager.build(scheduled)
        count, used = plain.num_reqs, plain.num_tokens
        assert padded.req_ids == plain.req_ids
        assert {name: getattr(padded, name).ctypes.data for name in addresses[size]} == addresses[size]
        for name in OF_TOKENS:
            np.testing.assert_array_equal(getattr(padded, name)[:used], getattr(plain, name), err_msg=name)
        assert (padded.slot_mapping[used:] == -1).all()
        assert (padded.token_to_req_indices[used:] == rows - 1).all()
        for name in OF_ROWS:
            np.testing.assert_array_equal(getattr(padded, name)[:count], getattr(plain, name), err_msg=name)
            assert not getattr(padded, name)[count:].any()
        for name in STARTS:
            ends = getattr(plain, name)
            np.testing.assert_array_equal(getattr(padded, name)[: count + 1], ends, err_msg=name)
            assert (getattr(padded, name)[count + 1 :] == ends[-1]).all()
        assert padded.max_seq_len == plain.max_seq_len
        assert (padded.num_actual_reqs, padded.num_actual_tokens) == (count, used)


def test_decodes_alone_take_the_size_too(kernels):
    batch, builder = builder_of(kernels)
    builder.capture(4, num_tokens=6)
    batch.add_request("a", [2], 1)
    batch.add_request("b", [3], 2)
    for length in (2, 3):
        metadata = builder.build(bucket=(4, 6))
        assert metadata.seq_lens.tolist() == [length, length + 1, 0, 0]
        assert metadata.query_start_loc.tolist() == [0, 1, 2, 2, 2]
        assert metadata.max_query_len == 6


BAD_CAPTURES = [
    ("always", (9,), {"num_tokens": 12}, "num_reqs: 9 exceed the batch's max_num_reqs 8"),
    ("always", (8,), {"num_tokens": 21}, "num_tokens: 21 exceed max_num_batched_tokens 20"),
    ("always", (2,), {"num_tokens": 0}, "num_tokens: 0 is below 1"),
    ("always", (2,), {"num_tokens": 2.0}, "num_tokens: 2.0 is not an integer"),
    ("always", (2, 2), {"num_tokens": 8}, "num_tokens: 8 given beside query_len 2"),
    ("uniform", (2,), {"num_tokens": 8}, "num_tokens: 8, but backend 'plain' captures rows of one length alone"),
    ("uniform_decode", (2,), {"num_tokens": 8}, r"rows of one length alone \(cuda_graph=\"uniform_decode\"\)"),
    ("never", (2,), {"num_tokens": 8}, "num_tokens: 8, but backend 'plain' captures nothing"),
]


@pytest.mark.parametrize(("level", "size", "given", "message"), BAD_CAPTURES)
def test_bad_captures_name_themselves(kernels, level, size, given, message):
    batch, builder = new_builder(kernels, backend=Plain(config(spec(level))), max_tokens=20)
    before = core_state(batch), builder.captured
    with pytest.raises((ValueError, TypeError), match=message):
        builder.capture(*size, **given)
    assert (core_state(batch), builder.captured) == before


BAD_BUCKETS = [
    ((2, 9), {}, CaptureError, r"bucket: \(2, 9\) was not captured \(captured: 2, \(2, 8\)\)"),
    ((2,), {}, ValueError, "bucket: a tuple of 1 found; give"),
    ((2, 8, 1), {}, ValueError, "bucket: a tuple of 3 found"),
    ((2, 8.0), {}, TypeError, "bucket: 8.0 is not an integer"),
    ((True, 8), {}, TypeError, "bucket: True is not an integer"),
    ((2, 8), {"a": 1, "b": 1, "c": 1}, ValueError, "bucket: 2 rows captured, but this step has 3 requests"),
    ((2, 8), {"a": 5, "b": 4, "c": 0}, ValueError, "bucket: 8 tokens captured, but this step has 9; choose a larger"),
    ((2, 8), {"a": 9, "b": 0, "c": 0}, ValueError, "bucket: 2 rows captured with 8 tokens each, but row 0 .* runs 9"),
]


@pytest.mark.parametrize(("bucket", "scheduled", "error", "message"), BAD_BUCKETS)
def test_steps_that_do_not_fit(kernels, bucket, scheduled, error, message):
    batch, builder = builder_of(kernels)
    for name, blocks in {"a": [1, 2, 3], "b": [4, 5], "c": [6]}.items():
        batch.add_request(name, blocks)
    builder.capture(2)
    builder.capture(2, num_tokens=8)
    before = core_state(batch), builder.last_step
    with pytest.raises(error, match=message):
        builder.build(scheduled, bucket=bucket)
    assert (core_state(batch), builder.last_step) == before


def test_what_has_no_such_graphs(kernels):
    states = InputBatch(
        groups=[KVCacheGroup("full", 4, num_blocks=9), StateGroup("mamba", num_slots=5)], max_num_reqs=4,
        max_model_len=32, kernels=kernels,
    )  # fmt: skip
    backend = Plain(config(spec("always")))
    with pytest.raises(ValueError, match="num_tokens: 8, but group 'mamba' holds states"):
        MetadataBuilder(states, backend, max_num_batched_tokens=16).capture(2, num_tokens=8)
    shared = InputBatch(block_size=8, max_num_reqs=4, max_model_len=64, kernels=kernels)
    ranks = MetadataBuilder(shared, backend, max_num_batched_tokens=16, context_parallel=ContextParallel(2, 0, 4, 1))
    with pytest.raises(ValueError, match="num_tokens: 8, but ranks share out the contexts"):
        ranks.capture(2, num_tokens=8)
    batch, builder = builder_of(kernels)
    batch.add_request("a", [1])
    builder.capture(2, num_tokens=8)
    with pytest.raises(ValueError, match=r"^(run_ahead|bucket): "):
        builder.run_ahead(2, bucket=(2, 8))
