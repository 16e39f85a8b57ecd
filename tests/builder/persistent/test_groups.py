"""Several KV-cache groups with the persistent builder: worked numbers, windows, encoders and rows."""

import random

import numpy as np
import oracles
import pytest
from builder.persistent.group_batches import CROSS, FULL, WINDOW, batch_of, cross_batch
from core_state import core_state

from attncore.builder import (
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    metadata_from_fields,
    slice_by_requests,
    slice_metadata,
)

EXPANDED = KVCacheGroup("window", 8, kernel_block_size=4, sliding_window=6)


# ---- worked numbers --------------------------------------------------------------------------------------------------


def test_a_block_of_the_managers_is_several_of_the_kernels(kernels):
    batch = batch_of(kernels, KVCacheGroup("large", 16, kernel_block_size=4))
    batch.add_request("a", {"large": [1, 2]}, 16)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=32).build()
    assert metadata.block_table[0, :8].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert metadata.slot_mapping.tolist() == [2 * 16]
    assert metadata.paged_kv_indices.tolist() == [4, 5, 6, 7, 8]
    assert batch.block_ids("a") == {"large": [1, 2]}


@pytest.mark.parametrize(
    ("rank", "slots", "lens"),
    [
        (0, [20, -1, 21, -1, 22, -1, 23, -1, 36, -1, 31, -1, 12], [5, 5]),
        (1, [-1, 20, -1, 21, -1, 22, -1, 23, -1, 36, -1, 31, -1], [5, 4]),
    ],
)
def test_a_rank_of_two_keeps_every_other_token(kernels, rank, slots, lens):
    batch = InputBatch(max_num_reqs=2, max_model_len=24, block_size=8, kernels=kernels)
    batch.add_request("a", [5, 9, 2])
    batch.add_request("b", [7, 3, 8], 6)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, context_parallel=ContextParallel(2, rank, 4))
    metadata = builder.build({"a": 10, "b": 3})
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.seq_lens.tolist() == lens
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 3 + (lens[1] > 4)]


def test_local_lengths_of_a_rank(kernels):
    batch = InputBatch(max_num_reqs=3, max_model_len=24, block_size=8, kernels=kernels)
    for name, computed in (("a", 7), ("b", 8), ("c", 9)):
        batch.add_request(name, [1, 2], computed)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, context_parallel=ContextParallel(2, 1, 4))
    assert builder.build().seq_lens.tolist() == [4, 4, 5]


def test_a_token_of_a_group_is_slotted_by_its_own_table(kernels):
    groups = [KVCacheGroup("a", 3), KVCacheGroup("b", 16), KVCacheGroup("c", 3), KVCacheGroup("d", 1)]
    batch = batch_of(kernels, *groups, max_model_len=20)
    batch.add_request("r", {"a": [7, 8], "b": [5], "c": [9, 4], "d": [1, 2, 3, 9]}, 3)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    slots = {name: group.slot_mapping.tolist() for name, group in metadata.groups.items()}
    assert slots == {"a": [24], "b": [83], "c": [12], "d": [9]}
    assert metadata.groups["c"].paged_kv_indices.tolist() == [9, 4]
    assert metadata is metadata.groups["a"]


@pytest.mark.parametrize("num_reqs", [15, 16, 37])
def test_many_rows_of_every_size(kernels, num_reqs):
    """Long runs of decodes, as many at once as a kernel may take, with roll-backs and blocks that are replaced."""
    rng, longest = random.Random(num_reqs), 60
    sizes = (4, 3, 1, 16, 7, 3, 64, 2**31 - 1)
    groups = [KVCacheGroup(f"{index}, of {size}", size) for index, size in enumerate(sizes)]
    batch = batch_of(kernels, *groups, max_num_reqs=num_reqs, max_model_len=longest)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    blocks = {name: {group.name: [] for group in groups} for name in range(num_reqs)}
    for name, held in blocks.items():
        for group in groups:
            held[group.name] = [rng.randint(1, 2**31 - 1) for _ in range(-(-longest // group.block_size))]
        batch.add_request(name, held, rng.randint(0, 20))
    for _ in range(150 if kernels == "cython" else 40):
        computed = {name: batch.num_computed_tokens(name) for name in batch.req_ids}
        metadata = builder.build()
        assert metadata.max_seq_len == max(computed.values()) + 1
        for group in groups:
            rows = [(blocks[name][group.name], computed[name], 1) for name in metadata.req_ids]
            of_group = metadata.groups[group.name]
            for name, expected in oracles.persistent_step(rows, group.block_size).items():
                value = getattr(of_group, name)
                assert (value if isinstance(value, int) else value.tolist()) == expected, name
        name, group = rng.randrange(num_reqs), rng.choice(groups)
        index, block = rng.randrange(len(blocks[name][group.name])), rng.randint(1, 2**31 - 1)
        assert batch.replace_block(name, index, block, group.name) == blocks[name][group.name][index]
        blocks[name][group.name][index] = block
        back = {name: rng.randint(1, 40) for name, count in computed.items() if count > 55 or rng.random() < 0.02}
        batch.rollback_many({name: min(count, computed[name]) for name, count in back.items()})


@pytest.mark.parametrize("row", [0, 5, 15, 16, 36])
@pytest.mark.parametrize("size", [4, 3])
def test_any_row_may_lack_a_block(kernels, row, size):
    batch = batch_of(kernels, FULL, KVCacheGroup("other", size), max_num_reqs=37)
    for name in range(37):
        batch.add_request(name, {"full": [1, 2], "other": [3, 4, 5][: 1 if name == row else 3]}, size - 1)
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    builder.build()
    before = core_state(batch)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"row {row} \(request {row}\) in group 'other' holds 1 block but needs"):
            builder.build()
        assert core_state(batch) == before


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_what_a_window_has_passed_becomes_the_null_block(kernels):
    batch = batch_of(kernels, FULL, WINDOW)
    batch.add_request("a", {"full": [1, 2, 3], "window": [4, 5, 6]}, 10)
    # Token 10 sees tokens 5 to 10: block 0 is passed, block 1 is not.
    assert batch.release_passed_blocks(num_rollback=2) == {}
    assert batch.release_passed_blocks() == {"a": {"window": [4]}}
    assert batch.release_passed_blocks() == {}
    assert batch.block_ids("a") == {"full": [1, 2, 3], "window": [0, 5, 6]}
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    assert metadata.groups["window"].slot_mapping.tolist() == [26]
    assert metadata.groups["window"].block_table[0, :3].tolist() == [0, 5, 6]


def test_half_a_block_of_the_managers_is_not_given_up(kernels):
    batch = batch_of(kernels, EXPANDED)
    batch.add_request("a", {"window": [1, 2]}, 12)  # sees tokens 7 to 12
    assert batch.release_passed_blocks() == {}
    MetadataBuilder(batch, max_num_batched_tokens=8).build()
    assert batch.release_passed_blocks() == {"a": {"window": [1]}}
    assert batch._core.tables["window"].array[0, :4].tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize(("group", "count", "block"), [(WINDOW, 6, 1), (EXPANDED, 12, 0)])
def test_a_rollback_to_what_a_window_has_passed_is_refused(kernels, group, count, block):
    batch = batch_of(kernels, group)
    batch.add_request("a", {"window": [1, 2, 3, 4, 5][: 20 // group.block_size + 1]}, 18)
    batch.add_request("b", {"window": [11]}, 2)
    assert batch.release_passed_blocks()["a"]["window"][0] == 1
    before = core_state(batch)
    message = rf"num_tokens: request 'a' rolled back to {18 - count} tokens would see block {block} of group 'window'"
    with pytest.raises(ValueError, match=message):
        batch.rollback_many({"b": 1, "a": count})
    assert core_state(batch) == before


def test_a_rollback_into_a_released_block_is_refused(kernels):
    batch = batch_of(kernels, WINDOW)
    batch.add_request("a", {"window": [1, 2, 3]}, 10)
    assert batch.release_passed_blocks() == {"a": {"window": [1]}}
    with pytest.raises(ValueError, match=r"rolled back to 0 tokens would see block 0 of group 'window'"):
        batch.rollback("a", 10)
    batch.rollback("a", 0)  # takes nothing back
    assert batch.num_computed_tokens("a") == 10


def test_a_rollback_to_a_null_block_behind_one_that_is_held_is_refused(kernels):
    batch = batch_of(kernels, KVCacheGroup("window", 2, sliding_window=4))
    batch.add_request("a", {"window": [1, 2, 3, 4, 5, 6]}, 12)
    batch.replace_block("a", 2, 0, "window")  # tokens 4 and 5, which the window has passed
    with pytest.raises(ValueError, match=r"rolled back to 6 tokens would see block 2 of group 'window'"):
        batch.rollback("a", 6)  # the next query sees tokens 3 to 6
    batch.rollback("a", 3)
    assert batch.num_computed_tokens("a") == 9


# ---- encoders --------------------------------------------------------------------------------------------------------


def test_encoder_tokens_have_slots_in_the_first_step_only(kernels):
    builder = MetadataBuilder(cross_batch(kernels), max_num_batched_tokens=8, depth=1)
    metadata = builder.build()
    assert metadata.cross_slot_mapping.tolist() == [12, 13, 14, 15, 16]
    assert metadata.encoder_query_start_loc.tolist() == [0, 5, 5]
    cross = metadata.groups["encoder"]
    assert (cross.seq_lens.tolist(), cross.paged_kv_indices.tolist()) == ([5, 0], [3, 4])
    assert cross.max_seq_len == 5
    assert not hasattr(cross, "slot_mapping")
    for _ in range(2):
        metadata = builder.build()
        assert metadata.cross_slot_mapping.tolist() == []
        assert metadata.groups["encoder"].seq_lens.tolist() == [5, 0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replaced_block_of_an_encoder_is_seen_by_the_next_step(kernels, depth):
    batch = cross_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, depth=depth)
    for _ in range(3):
        builder.build()
    assert batch.replace_block("a", 1, 9, "encoder") == 4
    for _ in range(2):
        cross = builder.build().groups["encoder"]
        assert cross.paged_kv_indices.tolist() == [3, 9]


def test_a_preempted_request_runs_its_encoder_again(kernels):
    batch = cross_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    builder.build()
    assert batch.preempt("a") == {"full": [1, 2], "encoder": [3, 4]}
    assert batch.truncate_blocks("a", 0, "encoder") == []  # it holds none, and none of its encoder tokens are cached
    batch.append_blocks("a", {"full": [8]})
    message = r"row 0 \(request 'a'\) in group 'encoder' holds 0 blocks but needs 2 for its 5 encoder tokens"
    with pytest.raises(ValueError, match=message):
        builder.build()
    batch.append_blocks("a", {"encoder": [9, 10]})
    assert builder.build().cross_slot_mapping.tolist() == [36, 37, 38, 39, 40]


def test_encoder_tokens_beyond_the_builder_are_refused(kernels):
    batch = batch_of(kernels, FULL, CROSS, max_encoder_len=12)
    for name in "ab":
        batch.add_request(name, {"full": [1], "encoder": [2, 3, 4]}, encoder_seq_len=12)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, max_num_encoder_tokens=12)
    before = core_state(batch)
    with pytest.raises(ValueError, match="scheduled: 24 encoder tokens in this step exceed max_num_encoder_tokens"):
        builder.build()
    assert core_state(batch) == before
    assert builder.build({"b": 0}).cross_slot_mapping.shape == (12,)
    assert builder.build().encoder_query_lens.tolist() == [0, 12]


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_swapped_rows_take_everything_along(kernels):
    batch = cross_batch(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    builder.build()
    batch.swap_rows(0, 1)
    assert batch.req_ids == ("b", "a")
    metadata = builder.build()
    assert (metadata.req_ids, metadata.moves) == (("b", "a"), ())
    assert metadata.slot_mapping.tolist() == [21, 5]
    assert metadata.groups["encoder"].seq_lens.tolist() == [0, 5]
    assert metadata.groups["encoder"].block_table[:, :2].tolist() == [[0, 0], [3, 4]]


def test_a_request_swapped_into_a_hole_ends_the_rows_behind_it(kernels):
    batch = InputBatch(max_num_reqs=3, max_model_len=16, block_size=4, kernels=kernels)
    for index, name in enumerate("abc"):
        batch.add_request(name, [index + 1], index)
    batch.remove_request("a")
    batch.swap_rows(0, 2)
    assert (batch.req_ids, batch.num_rows) == (("c", "b"), 2)
    metadata = MetadataBuilder(batch, max_num_batched_tokens=8).build()
    assert (metadata.req_ids, metadata.slot_mapping.tolist()) == (("c", "b"), [14, 9])


def test_needs_block_asks_one_group_or_all(kernels):
    batch = batch_of(kernels, FULL, KVCacheGroup("large", 16), CROSS, max_encoder_len=4)
    batch.add_request("a", {"full": [1], "large": [2], "encoder": []}, 4)
    batch.add_request("b", {"full": [1, 3, 4, 5, 6], "large": [2], "encoder": []}, 16)
    assert batch.needs_block() == ["a", "b"]
    assert (batch.needs_block("full"), batch.needs_block("large"), batch.needs_block("encoder")) == (["a"], ["b"], [])


def test_memory_is_that_of_every_groups_table(kernels):
    one = batch_of(kernels, FULL)
    two = batch_of(kernels, FULL, KVCacheGroup("large", 16, kernel_block_size=2))
    assert two.nbytes - one.nbytes == two._core.tables["large"].nbytes
    assert two._core.tables["large"].nbytes >= 4 * 4 * (24 + 4)
    owners = (two._core, *two._core.tables.values())
    owned = {id(a): a.nbytes for owner in owners for a in vars(owner).values() if isinstance(a, np.ndarray)}
    assert two.nbytes == sum(owned.values())


def test_views_of_a_cross_group_have_the_encoders_longest_length(kernels):
    """A kernel may read no more keys than ``max_seq_len``."""
    batch = InputBatch(
        max_num_reqs=4, max_model_len=64, max_encoder_len=32, kernels=kernels,
        groups=[KVCacheGroup("self", 4), KVCacheGroup("cross", 4, cross=True)],
    )  # fmt: skip
    builder = MetadataBuilder(batch, max_num_batched_tokens=64)
    batch.add_request("a", {"self": [1, 2], "cross": [3, 4, 5, 6, 7]}, 2, encoder_seq_len=20)
    batch.add_request("b", {"self": [8, 9], "cross": [10, 11]}, 0, encoder_seq_len=6)
    step = builder.build({"b": 3}).groups["cross"]
    assert step.max_seq_len == 20
    received = metadata_from_fields(step.asdict_zerocopy())
    parts = (step, received, *(slice_metadata(step, part, block_size=4) for part in slice_by_requests([1, 3], 2)))
    for part in (*parts, step.decode_metadata, step.prefill_metadata):
        for view in filter(None, (part.decode_metadata, part.prefill_metadata)):
            assert view.max_seq_len == view.seq_lens.max()
    assert [step.decode_metadata.max_seq_len, step.prefill_metadata.max_seq_len] == [20, 6]
