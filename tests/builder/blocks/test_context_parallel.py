"""Decode context parallelism: slots, lengths and tables of every rank against plain Python."""

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.builder import (
    CommonMetadataBuilder,
    ContextParallel,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
)


def place(token, block_size, world_size, interleave):
    """(rank, virtual block, offset) of a token, as the rule is written."""
    virtual = block_size * world_size
    within = token % virtual
    rank = within // interleave % world_size
    offset = within // (world_size * interleave) * interleave + token % interleave
    return rank, token // virtual, offset


def test_the_worked_numbers():
    rank = ContextParallel(2, 0, 4)
    assert rank.slot_mapping([[5, 9, 2], [7, 3, 8]], [0, 6], [10, 3]).tolist() == [
        20, -1, 21, -1, 22, -1, 23, -1, 36, -1, 31, -1, 12,
    ]  # fmt: skip
    assert ContextParallel(2, 1, 4).seq_lens([8, 9, 10]).tolist() == [4, 4, 5]


@st.composite
def worlds(draw):
    interleave = draw(st.integers(1, 3))
    return draw(st.integers(1, 4)), interleave * draw(st.integers(1, 3)), interleave


@settings(max_examples=200, deadline=None)
@given(world=worlds(), rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=4))
def test_every_token_is_kept_once_and_read_back_by_its_rank(world, rows):
    world_size, block_size, interleave = world
    queries, contexts = [q for q, _ in rows], [c for _, c in rows]
    lens = [q + c for q, c in rows]
    width = oracles.cdiv(max(lens), block_size * world_size) + 1
    table = np.arange(1, len(rows) * width + 1).reshape(len(rows), width)
    for rank in range(world_size):
        mine = ContextParallel(world_size, rank, block_size, interleave)
        expected, kept = [], []
        for row, (query, context) in enumerate(rows):
            kept.append([])
            for token in range(context + query):
                owner, block, offset = place(token, block_size, world_size, interleave)
                slot = int(table[row, block]) * block_size + offset if owner == rank else -1
                if owner == rank:
                    kept[-1].append((token, slot))
                if token >= context:
                    expected.append(slot)
        slots = mine.slot_mapping(table, contexts, queries)
        assert (slots.tolist(), slots.dtype) == (expected, np.int64)
        local = mine.seq_lens(lens)
        assert (local.tolist(), local.dtype) == ([len(tokens) for tokens in kept], np.int32)
        local_table = mine.block_table(table, lens)
        indptr, indices, last = mine.page_lists(table, lens)
        for row, tokens in enumerate(kept):
            assert mine.positions(lens[row]).tolist() == [token for token, _ in tokens]
            slots_of_row = [slot for _, slot in tokens]
            # A kernel that reads the local table by the local length finds the tokens in their order.
            assert oracles.slots_of(local_table[row].tolist(), 0, len(tokens), block_size) == slots_of_row
            pages = indices[indptr[row] : indptr[row + 1]].tolist()
            assert oracles.slots_of(pages, 0, len(tokens), block_size) == slots_of_row
            assert last[row] == ((len(tokens) - 1) % block_size + 1 if tokens else 0)
            assert not local_table[row, len(pages) :].any()


def test_how_many_keys_each_query_of_a_step_may_see():
    rank = ContextParallel(2, 0, 4, interleave=2)
    assert rank.positions(10).tolist() == [0, 1, 4, 5, 8, 9]
    assert rank.seq_lens(np.arange(5, 10) + 1).tolist() == [4, 4, 4, 5, 6]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_a_token_that_is_written_nowhere_is_written_by_no_rank(rank, interleave):
    local = ContextParallel(3, rank, 4, interleave).local_slots([-1, 12, -1])
    assert local.tolist() == [-1, 4 if rank == 0 else -1, -1]


def test_metadata_of_a_rank():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=8)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("prompt", [5, 9, 2], 0)
    batch.add_request("decode", [7, 3], 8)
    metadata = builder.build({"prompt": 10})
    rank = ContextParallel.of_virtual_blocks(8, 2, 0)
    local = rank.metadata(metadata)
    assert local.slot_mapping.tolist() == [12, 20, -1, 21, -1, 22, -1, 23, -1, 36, -1]
    assert local.seq_lens.tolist() == [5, 5]
    assert local.context_lens.tolist() == [4, 0]
    assert local.query_lens.tolist() == [1, 10]
    assert local.block_table.tolist() == [[7, 3], [5, 9]]
    assert local.paged_kv_indptr.tolist() == [0, 2, 4]
    assert local.paged_kv_last_page_len.tolist() == [1, 1]
    assert local.seq_start_loc.tolist() == [0, 5, 10]
    assert local.positions.tolist() == [8, *range(10)]
    assert (local.max_seq_len, local.max_decode_seq_len, local.max_prefill_seq_len) == (5, 5, 5)
    assert (local.num_decodes, local.num_prefills, local.num_tokens) == (1, 1, 11)
    assert local.req_ids == ("decode", "prompt")
    assert local.decode_metadata.block_table.tolist() == [[7, 3]]
    other = ContextParallel(2, 1, 4).metadata(metadata)
    assert ((local.slot_mapping < 0) != (other.slot_mapping < 0)).all()
    assert (local.seq_lens + other.seq_lens == metadata.seq_lens).all()


def list_step(pad=-1, **options):
    builder = CommonMetadataBuilder(8, max_seq_len_to_capture=32, **options)
    return builder.build([SequenceGroup(False, [Sequence(0, 1, 20, [1, 2, 3])])], pad)


def test_decodes_of_the_list_builder_too():
    local = ContextParallel(2, 1, 4).metadata(list_step())
    assert (local.slot_mapping.tolist(), local.seq_lens.tolist()) == ([-1], [10])
    assert (local.max_decode_seq_len, local.max_prefill_seq_len, local.from_groups) == (10, 0, True)


RANK = ContextParallel(2, 0, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ContextParallel(0, 0, 4), "world_size: 0 is below 1"),
        (lambda: ContextParallel(2, 2, 4), r"rank: 2 is outside 0\.\.1"),
        (lambda: ContextParallel(2, -1, 4), "rank: -1 is below 0"),
        (lambda: ContextParallel(2, 0.0, 4), "rank: 0.0 is not an integer"),
        (lambda: ContextParallel(2, 0, 0), "block_size: 0 is below 1"),
        (lambda: ContextParallel(2, 0, 4, 3), "interleave: 3 does not divide block_size 4"),
        (lambda: ContextParallel(2, 0, 4, 8), "interleave: 8 does not divide block_size 4"),
        (lambda: ContextParallel(2, 0, 4, 0), "interleave: 0 is below 1"),
        (lambda: ContextParallel(2, 0, 2**30), "world_size: 2 blocks of 1073741824 tokens do not fit int32"),
        (
            lambda: ContextParallel(3, 0, 4, tensor_parallel_size=8),
            "world_size: 3 does not divide tensor_parallel_size 8",
        ),
        (lambda: ContextParallel.of_virtual_blocks(16, 3, 0), "world_size: 3 does not divide the virtual block of 16"),
        (lambda: RANK.seq_lens([-1]), "seq_lens: -1 at index 0"),
        (lambda: RANK.local_slots([0.5]), r"slot_mapping: float64\[1\]"),
        (lambda: RANK.local_slots(np.array([2**63], np.uint64)), "slot_mapping: 9223372036854775808 is no slot"),
        (lambda: RANK.local_slots([3, -2]), "slot_mapping: -2 is no slot"),
        (lambda: RANK.slot_mapping([[1]], [8], [1]), "block_table: row 0 holds 1 block but needs 2 for its 9 tokens"),
        (lambda: RANK.block_table([[1]], [9]), "block_table: row 0 holds 1 block but needs 2"),
        (lambda: RANK.block_table([[1]], [9, 9]), "block_table: 1 row for 2 requests"),
        (lambda: RANK.positions(-1), "seq_len: -1 is below 0"),
        (lambda: RANK.metadata(list_step(2)), "metadata: padded for a graph"),
        (lambda: RANK.metadata(list_step(sliding_window=8)), "metadata: row 0 has a length capped by a sliding window"),
    ],
)
def test_bad_input_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()


def test_a_rank_that_keeps_no_key_has_a_table_with_a_column():
    """Without one all keys of a step would be its own."""
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=8)
    batch.add_request("a", [1], 2)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    mine = ContextParallel(2, 1, 4, interleave=4).metadata(metadata)
    assert (mine.seq_lens.tolist(), mine.block_table.tolist()) == ([0], [[0]])
