"""Contexts in chunks: each fits the workspace, together they are the contexts, in order, where the cache has them."""

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.builder import (
    InputBatch,
    MetadataBuilder,
    context_chunk_metadata,
    context_chunks,
    metadata_from_fields,
    new_tokens_metadata,
)
from attncore.builder.blocks import chunked_context


def test_a_worked_example():
    """A workspace of 16 among two that wait: 8 each, but the short one needs 5, which leaves 11, two blocks."""
    chunks = context_chunks([[3, 9, 2, 0, 0], [4, 0, 0, 0, 0], [5, 1, 8, 7, 6]], [5, 0, 18], 4, 16)
    assert chunks.num_chunks == 2
    assert chunks.chunk_starts.tolist() == [[0, 0, 0], [5, 0, 8]]
    assert chunks.chunk_seq_lens.tolist() == [[5, 0, 8], [0, 0, 10]]
    assert chunks.chunk_start_loc.tolist() == [[0, 5, 5, 13], [0, 0, 0, 10]]
    assert [one.tolist() for one in chunks.chunk_slots] == [
        [12, 13, 14, 15, 36, 20, 21, 22, 23, 4, 5, 6, 7],
        [32, 33, 34, 35, 28, 29, 30, 31, 24, 25],
    ]
    assert (chunks.max_chunk_len.tolist(), chunks.num_chunk_tokens.tolist()) == ([8, 10], [13, 10])
    for array in chunks[:3]:
        assert array.dtype == np.int32
    assert {one.dtype for one in chunks.chunk_slots} == {np.dtype(np.int64)}


def test_one_long_context_has_what_short_ones_leave():
    """An even share of a tenth for each would take ten chunks."""
    chunks = context_chunks(np.arange(1000).reshape(10, 100), [1000, *[10] * 9], 10, 1000)
    assert chunks.chunk_seq_lens[:, 0].tolist() == [910, 90]


@pytest.mark.parametrize("as_lists", [False, True])
@pytest.mark.parametrize("contexts", [[], [0, 0]])
def test_no_context_needs_no_chunk(contexts, as_lists):
    table = np.zeros((len(contexts), 0), np.int32)
    chunks = context_chunks(table.tolist() if as_lists else table, contexts, 4, 1)
    assert (chunks.num_chunks, chunks.chunk_slots) == (0, ())
    assert chunks.chunk_seq_lens.shape == chunks.chunk_starts.shape == (0, len(contexts))
    assert chunks.chunk_start_loc.shape == (0, len(contexts) + 1)
    assert chunks.max_chunk_len.tolist() == chunks.num_chunk_tokens.tolist() == []


@settings(max_examples=200, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 200) | st.just(0), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 16]),
    spare=st.integers(0, 300),
    seed=st.integers(0, 1000),
)
def test_chunks_cover_every_context_once(contexts, block_size, spare, seed):
    waiting = sum(context > 0 for context in contexts)
    workspace = max(1, waiting * block_size + spare)
    width = max(oracles.cdiv(context, block_size) for context in contexts) + 1
    table = np.random.default_rng(seed).permutation(len(contexts) * width).reshape(len(contexts), width)
    chunks = context_chunks(table, contexts, block_size, workspace)
    done = [0] * len(contexts)
    for index in range(chunks.num_chunks):
        starts, lens = chunks.chunk_starts[index].tolist(), chunks.chunk_seq_lens[index].tolist()
        assert starts == done
        assert chunks.chunk_start_loc[index].tolist() == oracles.sums(lens)
        assert chunks.max_chunk_len[index] == max(lens)
        assert 0 < chunks.num_chunk_tokens[index] == sum(lens) <= workspace
        slots = []
        for row, (start, length) in enumerate(zip(starts, lens, strict=True)):
            slots += oracles.slots_of(table[row].tolist(), start, start + length, block_size)
            assert length > 0 or start == contexts[row]
            assert start % block_size == 0 or start == contexts[row]
        assert chunks.chunk_slots[index].tolist() == slots
        done = [start + length for start, length in zip(starts, lens, strict=True)]
        cut = sum(end < context for end, context in zip(done, contexts, strict=True))
        assert sum(lens) > workspace - cut * block_size or not cut  # nothing but alignment is left free
    assert done == contexts


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"workspace_tokens": 7},
            ValueError,
            "workspace_tokens: 7 is less than a block of 4 tokens for each of 2 prefills",
        ),
        ({"workspace_tokens": 0}, ValueError, "workspace_tokens: 0 is below 1"),
        ({"workspace_tokens": 2**31}, ValueError, "workspace_tokens: 2147483648 does not fit int32"),
        ({"workspace_tokens": 8.0}, TypeError, "workspace_tokens: 8.0 is not an integer"),
        ({"block_size": 0}, ValueError, "block_size: 0 is below 1"),
        ({"context_lens": [5, -1, 0]}, ValueError, "context_lens: "),
        ({"context_lens": [5, 6]}, ValueError, "block_table: 3 rows for 2 requests"),
        ({"context_lens": [5, 9, 0]}, ValueError, "block_table: row 1 holds 2 blocks but needs 3 for its 9 tokens"),
    ],
)
def test_what_does_not_fit(changes, error, text):
    given = {"block_table": np.arange(6).reshape(3, 2), "context_lens": [5, 6, 0], "block_size": 4}
    with pytest.raises(error) as caught:
        context_chunks(**(given | {"workspace_tokens": 9} | changes))
    assert str(caught.value).startswith(text)


@pytest.fixture
def metadata():
    """Prefills of 3 after 9 and of 2 after nothing, beside a decode after 5."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("a", [1, 2, 3], num_computed_tokens=9)
    batch.add_request("b", [4, 5], num_computed_tokens=5)
    batch.add_request("c", [6])
    return builder.build({"a": 3, "c": 2})


def test_metadata_of_a_chunk_and_of_the_rest(metadata):
    prefills = metadata.prefill_metadata
    host = prefills.host
    order = [prefills.req_ids.index(name) for name in "ac"]
    chunks = context_chunks(host.block_table, host.context_lens, 4, 4)
    assert chunks.num_chunks == 3
    lens = [[4, 0], [4, 0], [1, 0]]
    for index in range(3):
        step = context_chunk_metadata(prefills, chunks, index)
        assert step.encoder_seq_lens[order].tolist() == step.encoder_query_lens[order].tolist() == lens[index]
        assert step.encoder_query_start_loc.tolist() == step.encoder_seq_start_loc.tolist()
        assert step.encoder_query_start_loc.tolist() == oracles.sums(step.encoder_seq_lens.tolist())
        assert step.cross_slot_mapping.tolist() == [-1] * sum(lens[index])
        assert step.cross_block_table.shape == (2, 0)
        assert (step.num_encoder_tokens, step.max_encoder_seq_len) == (sum(lens[index]), max(lens[index]))
        assert step.query_start_loc.tolist() == prefills.query_start_loc.tolist()
        assert (step.num_tokens, step.num_prefills, step.req_ids) == (5, 2, prefills.req_ids)
    own = new_tokens_metadata(prefills)
    assert own.seq_lens[order].tolist() == own.query_lens[order].tolist() == [3, 2]
    assert own.context_lens.tolist() == [0, 0]
    assert own.slot_mapping.tolist() == [-1] * 5
    assert own.positions.tolist() == [i for count in own.query_lens for i in range(count)]
    assert own.block_table.shape == (2, 0)
    assert own.paged_kv_indptr.tolist() == [0, 0, 0]
    assert (own.max_seq_len, own.max_prefill_seq_len, own.max_query_len) == (3, 3, 3)
    assert not hasattr(own, "encoder_seq_lens")


def test_metadata_that_is_no_step_of_those_prefills(metadata):
    chunks = context_chunks([[1, 2, 3], [4, 5, 0], [6, 0, 0]], [9, 5, 0], 4, 64)
    with pytest.raises(ValueError, match=r"^metadata: 2 prefills in 3 requests; take its prefill_metadata"):
        context_chunk_metadata(metadata, chunks, 0)
    with pytest.raises(ValueError, match=r"^metadata: 2 prefills in 3 requests"):
        new_tokens_metadata(metadata)
    with pytest.raises(ValueError, match=r"^chunks: made of 3 prefills, but the metadata has 2 requests"):
        context_chunk_metadata(metadata.prefill_metadata, chunks, 0)
    with pytest.raises(ValueError, match=r"^index: 1 found; there are 1 chunk"):
        context_chunk_metadata(metadata.prefill_metadata, chunks, 1)


def test_spans_of_the_new_tokens_end_where_their_positions_do():
    """Positions begin at 0 without a context, and so do ends of spans; a context in chunks has them as they were."""
    batch = InputBatch(max_num_reqs=3, max_model_len=64, block_size=4, spans=True)
    for name, computed, spans in (("a", 6, [(8, 11), (11, 14)]), ("b", 0, [(1, 3)]), ("c", 3, [])):
        batch.add_request(name, [4 * computed + k for k in range(1, 6)], computed)
        batch.set_spans(name, spans)
    step = MetadataBuilder(batch, max_num_batched_tokens=64).build({"a": 8, "b": 4, "c": 2})
    assert step.req_ids == ("a", "b", "c")
    prefills = step.prefill_metadata
    assert prefills.span_ends.tolist() == [0, 0, 11, 11, 11, 14, 14, 14, 0, 3, 3, 0, 0, 0]
    new = new_tokens_metadata(prefills)
    assert new.span_ends.tolist() == [0, 0, 5, 5, 5, 8, 8, 8, 0, 3, 3, 0, 0, 0]
    assert new.span_ends.dtype == np.int32
    assert metadata_from_fields(new.asdict_zerocopy()).span_ends.tolist() == new.span_ends.tolist()
    chunks = context_chunks(prefills.host.block_table, prefills.host.context_lens, 4, 16)
    assert context_chunk_metadata(prefills, chunks, 0).span_ends.tolist() == prefills.span_ends.tolist()


def test_many_chunks_are_made_at_once_and_too_many_are_refused(monkeypatch):
    chunks = context_chunks(np.arange(1 << 17)[None], [1 << 18], 2, 2)
    assert chunks.num_chunks == 1 << 17
    assert chunks.chunk_starts[-1].tolist() == [(1 << 18) - 2]
    assert np.array_equal(np.concatenate(chunks.chunk_slots), np.arange(1 << 18))
    with pytest.raises(ValueError, match=r"^workspace_tokens: 2 divide the contexts of 1 prefill into 4194303 chunks"):
        context_chunks(np.zeros((1, 1 << 22), np.int32), [1 << 23], 2, 2)
    monkeypatch.setattr(chunked_context, "_MOST_LENS", 99)
    with pytest.raises(ValueError, match=r"^workspace_tokens: 8 divide the contexts of 4 prefills into 25 chunks"):
        context_chunks(np.zeros((4, 50), np.int32), [50] * 4, 1, 8)


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_slots_are_the_same_however_many_are_ordered_at_once(monkeypatch, most):
    table, contexts = np.arange(40).reshape(4, 10), [17, 0, 38, 5]
    wanted = context_chunks(table, contexts, 4, 13)
    monkeypatch.setattr(chunked_context, "_TOKENS", most)
    for one, other in zip(context_chunks(table, contexts, 4, 13).chunk_slots, wanted.chunk_slots, strict=True):
        assert one.tolist() == other.tolist()
