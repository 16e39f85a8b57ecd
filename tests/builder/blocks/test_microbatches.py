"""Slices of a batch: the metadata of each is what a batch of its rows alone would have."""

import itertools

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.abstract import BackendConfig
from attncore.builder import (
    BatchSlice,
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    metadata_from_fields,
    slice_by_requests,
    slice_by_tokens,
    slice_metadata,
)
from attncore.reference import ReferenceBackend

SPAN_FIELDS = ("slot_mapping", "positions", "token_to_req_indices", "seq_lens", "context_lens", "query_lens",
               "logits_indices", "query_start_loc", "seq_start_loc", "paged_kv_indptr",
               "paged_kv_indices", "paged_kv_last_page_len")  # fmt: skip
PAGE_FIELDS = ("paged_kv_indices", "paged_kv_last_page_len")
BLOCK = 4


def test_slices_by_requests_are_equal_in_requests():
    assert slice_by_requests([5, 1, 1, 2, 1], 2) == ((0, 2, 0, 6), (2, 5, 6, 10))
    assert slice_by_requests([5, 1, 1], 3) == ((0, 1, 0, 5), (1, 2, 5, 6), (2, 3, 6, 7))


def test_slices_by_tokens_are_equal_in_tokens_and_cut_requests():
    assert slice_by_tokens([1, 1, 6, 2], 2) == ((0, 3, 0, 5), (2, 4, 5, 10))
    assert slice_by_tokens([1, 1, 2, 2], 2) == ((0, 3, 0, 3), (2, 4, 3, 6))
    assert slice_by_tokens([2, 2], 2) == ((0, 1, 0, 2), (1, 2, 2, 4))
    assert slice_by_tokens([9], 3) == ((0, 1, 0, 3), (0, 1, 3, 6), (0, 1, 6, 9))
    assert slice_by_tokens([0, 2, 0, 2, 0], 2) == ((0, 3, 0, 2), (3, 5, 2, 4))


@settings(max_examples=200, deadline=None)
@given(lens=st.lists(st.integers(0, 5), min_size=1, max_size=12), data=st.data())
def test_slices_are_the_whole_in_order(lens, data):
    starts = oracles.sums(lens)
    if sum(lens):
        slices = slice_by_tokens(lens, data.draw(st.integers(1, sum(lens))))
        sizes = {part.token_stop - part.token_start for part in slices}
        assert max(sizes) - min(sizes) <= 1
        assert {row for part in slices for row in range(part.req_start, part.req_stop)} == set(range(len(lens)))
        check_order(slices, starts)
    slices = slice_by_requests(lens, data.draw(st.integers(1, len(lens))))
    sizes = {part.req_stop - part.req_start for part in slices}
    assert max(sizes) - min(sizes) <= 1
    assert all(a.req_stop == b.req_start for a, b in itertools.pairwise(slices))
    check_order(slices, starts)


def check_order(slices, starts):
    assert (slices[0].req_start, slices[0].token_start) == (0, 0)
    assert (slices[-1].req_stop, slices[-1].token_stop) == (len(starts) - 1, starts[-1])
    for before, after in itertools.pairwise(slices):
        assert before.token_stop == after.token_start
        assert after.req_start in (before.req_stop, before.req_stop - 1)
    for req_start, req_stop, token_start, token_stop in slices:
        assert starts[req_start] <= token_start <= token_stop <= starts[req_stop]


def step(rows, backend=None, block_size=BLOCK):
    """Metadata of a persistent step and its rows, decodes first, as (blocks, computed, query_len)."""
    batch = InputBatch(max_num_reqs=8, max_model_len=64, block_size=block_size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=256)
    blocks = itertools.count(1)
    held = {}
    for name, (computed, query) in enumerate(rows):
        ids = [next(blocks) for _ in range(oracles.cdiv(computed + query, block_size))]
        held[name] = ids, computed, query
        batch.add_request(name, ids, computed)
    metadata = builder.build({name: query for name, (_, query) in enumerate(rows)})
    return metadata, [held[name] for name in metadata.req_ids]


def rows_of_slice(rows, part):
    """The rows of a slice, a cut request being shorter, or further on."""
    found, start = [], 0
    for row, (blocks, computed, query) in enumerate(rows):
        first, last = max(start, part.token_start), min(start + query, part.token_stop)
        if part.req_start <= row < part.req_stop:
            found.append((blocks, computed + first - start, last - first))
        start += query
    return found


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=6),
    data=st.data(),
    by_tokens=st.booleans(),
    block_size=st.sampled_from([1, 3, 4]),
)
def test_every_field_of_a_slice_is_that_of_a_batch_of_its_own(rows, data, by_tokens, block_size):
    metadata, held = step(rows, block_size=block_size)
    before = {name: getattr(metadata, name).tobytes() for name in SPAN_FIELDS}
    lens = metadata.query_lens
    count = data.draw(st.integers(1, min(4, int(lens.sum()) if by_tokens else len(lens))))
    for part in (slice_by_tokens if by_tokens else slice_by_requests)(lens, count):
        view = slice_metadata(metadata, part, block_size=block_size)
        mine = rows_of_slice(held, part)
        expected = oracles.persistent_step(mine, block_size)
        for name in SPAN_FIELDS:
            assert getattr(view, name).tolist() == expected[name], name
        # A prefill that a cut leaves one token is a prefill: rows keep their kind.
        num_decodes = max(0, min(metadata.num_decodes, part.req_stop) - part.req_start)
        decodes = [computed + query for _, computed, query in mine[:num_decodes]]
        prefills = [(computed + query, query) for _, computed, query in mine[num_decodes:]]
        for name, value in {
            "num_reqs": len(mine), "num_tokens": part.token_stop - part.token_start,
            "num_decodes": num_decodes, "num_decode_tokens": num_decodes,
            "num_prefills": len(prefills), "num_prefill_tokens": sum(query for _, query in prefills),
            "max_query_len": expected["max_query_len"], "max_seq_len": expected["max_seq_len"],
            "max_decode_seq_len": max(decodes, default=0),
            "max_prefill_seq_len": max((length for length, _ in prefills), default=0),
        }.items():  # fmt: skip
            assert getattr(view, name) == value, name
        assert view.req_ids == metadata.req_ids[part.req_start : part.req_stop]
        widest = max(len(blocks) for blocks, _, _ in mine)
        assert [row[:widest].tolist() for row in view.block_table] == [
            blocks + [0] * (widest - len(blocks)) for blocks, _, _ in mine
        ]
        if prefills and num_decodes:
            assert view.prefill_metadata.query_start_loc.tolist() == oracles.sums(q for _, q in prefills)
            assert view.decode_metadata.seq_lens.tolist() == decodes
    assert before == {name: getattr(metadata, name).tobytes() for name in SPAN_FIELDS}


@pytest.mark.parametrize("skipped", [(), ("paged_kv_indices",), ("paged_kv_last_page_len",), PAGE_FIELDS])
def test_a_step_that_came_with_some_of_its_page_lists_is_cut(skipped):
    """What a rank did not send, a slice has not either."""
    metadata, held = step([(6, 1), (5, 11), (0, 8)])
    arrived = metadata_from_fields(metadata.asdict_zerocopy(skip_fields=set(skipped)))
    for part in slice_by_tokens(metadata.query_lens, 3):
        view = slice_metadata(arrived, part, block_size=BLOCK)
        expected = oracles.persistent_step(rows_of_slice(held, part), BLOCK)
        for name in set(SPAN_FIELDS) - set(skipped):
            assert getattr(view, name).tolist() == expected[name], name
        for name in skipped:
            with pytest.raises(AttributeError, match=name):
                getattr(view, name)


def test_a_step_that_came_without_slots_of_encoder_tokens_is_cut():
    batch = InputBatch(
        max_num_reqs=2, max_model_len=64, max_encoder_len=16,
        groups=[KVCacheGroup("decoder", BLOCK), KVCacheGroup("encoder", BLOCK, cross=True)],
    )  # fmt: skip
    batch.add_request("a", {"decoder": [1, 2, 3], "encoder": [4]}, encoder_seq_len=3)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=64).build({"a": 9})
    arrived = metadata_from_fields(metadata.asdict_zerocopy(skip_fields={"cross_slot_mapping"}))
    views = [slice_metadata(arrived, part, block_size=BLOCK) for part in slice_by_tokens(metadata.query_lens, 2)]
    assert [view.query_lens.tolist() for view in views] == [[4], [5]]
    assert [view.encoder_query_lens.tolist() for view in views] == [[3], [0]]


def test_slices_run_in_order_give_what_the_batch_gives():
    torch.manual_seed(5)
    config = BackendConfig(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=BLOCK, device="cpu")
    backend = ReferenceBackend(config)
    metadata, _ = step([(9, 1), (6, 1), (5, 11), (0, 8)], backend)
    impl = backend.impl("layer", scale=0.3)
    whole_cache = torch.randn_like(backend.allocate_kv_cache(20))
    sliced_cache = whole_cache.clone()
    query = torch.randn(metadata.num_tokens, 4, 8)
    key, value = torch.randn(2, metadata.num_tokens, 2, 8).unbind()
    whole = impl.forward(query, key, value, whole_cache, metadata)
    parts = []
    for part in slice_by_tokens(metadata.host.query_lens, 3):
        view = slice_metadata(metadata, part, block_size=BLOCK)
        tokens = slice(part.token_start, part.token_stop)
        parts.append(impl.forward(query[tokens], key[tokens], value[tokens], sliced_cache, view))
    torch.testing.assert_close(torch.cat(parts), whole)
    assert torch.equal(sliced_cache, whole_cache)


def list_step(pad=-1, layout="flashinfer"):
    def group(is_prompt, *sequences):
        return SequenceGroup(is_prompt, [Sequence(i, *row) for i, row in enumerate(sequences)])

    groups = [group(False, (1, 4, [4, 6]), (1, 8, [9, 2, 7]), (1, 3, [5]))]
    if pad < 0:
        groups.insert(0, group(True, (5, 3, [8, 3]), (2, 0, [1])))
    builder = CommonMetadataBuilder(4, layout, max_seq_len_to_capture=16, chunked_prefill=True)
    return builder.build(groups, pad)


def test_slices_of_the_list_builder():
    metadata = list_step()
    first, second = (slice_metadata(metadata, part) for part in slice_by_requests(metadata.query_lens, 2))
    assert (first.num_prefills, first.num_prefill_tokens, first.num_decodes) == (2, 7, 0)
    assert (second.num_prefills, second.num_decodes, second.num_decode_tokens) == (0, 3, 3)
    assert second.slot_mapping.tolist() == [24, 28, 23]
    assert second.token_to_req_indices.tolist() == [0, 1, 2]
    assert second.logits_indices.tolist() == [0, 1, 2]
    assert second.paged_kv_indptr.tolist() == [0, 2, 5, 6]
    assert second.paged_kv_indices.tolist() == [4, 6, 9, 2, 7, 5]
    assert (second.max_decode_seq_len, second.max_seq_len, first.max_prefill_seq_len) == (9, 9, 8)
    mixed = slice_metadata(metadata, BatchSlice(1, 3, 5, 8))
    assert mixed.prefill_metadata.slot_mapping.tolist() == [4, 5]
    assert mixed.decode_metadata.slot_mapping.tolist() == [24]


def test_slices_of_a_batch_that_a_graph_pads():
    metadata = list_step(pad=3)
    first = slice_metadata(metadata, BatchSlice(0, 2, 0, 2))
    mixed = slice_metadata(metadata, BatchSlice(2, 4, 2, 4))
    padding = slice_metadata(metadata, BatchSlice(4, 6, 4, 6))
    assert (first.num_decodes, first.num_decode_tokens) == (2, 2)
    assert (mixed.num_reqs, mixed.num_decodes, mixed.num_decode_tokens) == (2, 1, 2)
    assert mixed.seq_lens.tolist() == [4, 1]
    assert mixed.slot_mapping.tolist() == [23, -1]
    assert mixed.query_start_loc.tolist() == [0, 1]
    assert mixed.paged_kv_indptr.tolist() == [0, 1, 1]
    assert (padding.num_reqs, padding.num_decodes, padding.num_decode_tokens) == (2, 0, 2)
    assert padding.query_start_loc.tolist() == [0]
    assert padding.seq_start_loc.tolist() == [0, 1, 2]
    assert padding.slot_mapping.tolist() == [-1, -1]


PERSISTENT = step([(4, 1), (0, 6)])[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: slice_by_requests([1, 2], 3), "num_slices: 3 slices of 2 requests"),
        (lambda: slice_by_requests([1, 2], 0), "num_slices: 0 is below 1"),
        (lambda: slice_by_tokens([1, 2], 4), "num_slices: 4 slices of 3 tokens"),
        (lambda: slice_by_tokens([1, -2], 1), "query_lens: -2 at index 1"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(0, 3, 0, 7)), "batch_slice: rows 0:3 of a batch of 2 rows"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(1, 1, 1, 1)), "batch_slice: rows 1:1"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(-1, 1, 0, 1)), "batch_slice.req_start: -1 is below 0"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(1, 2, 0, 7)), "batch_slice: tokens 0:7 do not begin in row 1"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(0, 1, 0, 2)), "batch_slice: tokens 0:2 do not begin in row 0"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(0, 2, 0, 1)), "batch_slice: tokens 0:1"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(1, 2, 5, 3)), "batch_slice: tokens 5:3"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(0, 2, 0, 3)), "block_size: needed to slice through a request"),
        (lambda: slice_metadata(PERSISTENT, BatchSlice(0, 2, 0, 3), block_size=0), "block_size: 0 is below 1"),
        (
            lambda: slice_metadata(PERSISTENT, BatchSlice(0, 2, 0, 3), block_size=1),
            "block_size: 1, but the last request has .* tokens? in .* pages?",
        ),
        (
            lambda: slice_metadata(PERSISTENT, BatchSlice(0, 2, 0, 3), block_size=64),
            "block_size: 64, but the last request has .* tokens? in .* pages?",
        ),
        (
            lambda: slice_metadata(list_step(), BatchSlice(0, 1, 0, 3)),
            "batch_slice: cuts a request of the list builder",
        ),
    ],
)
def test_bad_input_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()
    assert np.array_equal(PERSISTENT.query_start_loc, [0, 1, 7])
