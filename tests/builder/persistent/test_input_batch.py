"""The persistent builder, case by case: limits, refusals that change nothing, and caches that must not go stale."""

import itertools
import threading

import numpy as np
import pytest
from core_state import core_state

from attncore.builder import InputBatch, MetadataBuilder
from attncore.errors import ConcurrentUseError


@pytest.fixture
def batch(kernels):
    return InputBatch(max_num_reqs=4, max_model_len=30, block_size=4, num_blocks=100, kernels=kernels)


@pytest.fixture
def builder(batch):
    return MetadataBuilder(batch, max_num_batched_tokens=20)


BAD_CALLS = [
    (lambda b: b.add_request("a", [9]), "req_id: 'a' is in the batch already"),
    (lambda b: b.add_request(None, [9]), "req_id: None cannot name"),
    (lambda b: b.add_request("z", [9], -1), "num_computed_tokens: -1 is below 0"),
    (
        lambda b: b.add_request("z", [9], 5),
        "block_ids: request 'z' has 5 computed tokens but holds 1 block .*; give it 2$",
    ),
    (lambda b: b.add_request("z", [9] * 9, 31), "num_computed_tokens: 31 of request 'z' exceed max_model_len 30"),
    (lambda b: b.add_request("z", [9] * 9), r"block_ids: request 'z': 9 block ids but room for 8 \(max_model_len 30"),
    (lambda b: b.add_request("z", [9, 100]), r"block_ids: request 'z': block id 100 at index 1 is outside 0\.\.99"),
    (lambda b: b.add_request("z", [9, -1]), r"block id -1 at index 1 is outside 0\.\.99"),
    (lambda b: b.add_request("z", [9, 2.0]), r"block id 2.0 at index 1 is not an integer"),
    (lambda b: b.add_request("z", [9, True]), r"block id True at index 1 is not an integer"),
    (lambda b: b.add_request("z", 9), r"block_ids: request 'z': 9 is not a sequence"),
    (lambda b: b.append_blocks("a", [9, 10, 100]), r"request 'a': block id 100 at index 2"),
    (lambda b: b.append_blocks("a", [9] * 7), r"request 'a': 7 block ids but room for 6"),
    (lambda b: b.append_blocks_many({"b": [9], "a": [10, -5]}), r"request 'a': block id -5 at index 1"),
    (lambda b: b.append_blocks_many({"b": [9], "q": [10]}), r"req_id: 'q' is not in the batch"),
    (lambda b: b.append_blocks("q", []), r"req_id: 'q' is not in the batch"),
    (lambda b: b.remove_request("q"), r"req_id: 'q' is not in the batch"),
    (lambda b: b.preempt("q"), r"req_id: 'q' is not in the batch"),
    (lambda b: b.rollback("b", 6), r"num_tokens: 6 goes past the start of request 'b', which has 5 computed tokens"),
    (lambda b: b.rollback("b", -1), r"num_tokens: -1 is below 0"),
    (lambda b: b.truncate_blocks("b", 1), r"num_blocks: 1 is outside 2\.\.2"),
    (lambda b: b.truncate_blocks("b", 3), r"num_blocks: 3 is outside 2\.\.2"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_a_refused_call_changes_nothing(batch, call, message):
    batch.add_request("a", [1, 2])
    batch.add_request("b", [3, 4], 5)
    before = core_state(batch)
    with pytest.raises((ValueError, TypeError), match=message):
        call(batch)
    assert core_state(batch) == before


BAD_STEPS = [
    ({"q": 1}, "scheduled: 'q' is not in the batch"),
    ({"a": -1}, "scheduled: -1 for 'a' is below 0"),
    ({"a": 2**31}, "scheduled: 2147483648 for 'a' is above 2147483647"),
    ({"a": 1.0}, "scheduled: 1.0, for 'a', is not an integer"),
    ({"a": True}, "scheduled: True, for 'a', is not an integer"),
    (
        {"a": 9},
        r"block_table: row 0 \(request 'a'\) holds 2 blocks but needs 3 for its 9 tokens \(block_size 4\); "
        r"append 1 \(append_blocks\)$",
    ),
    ({"b": 4}, r"block_table: row 1 \(request 'b'\) holds 2 blocks but needs 3 for its 9 tokens"),
    ({"c": 9}, r"scheduled: row 2 \(request 'c'\) has 22 computed tokens and 9 more exceed max_model_len 30"),
    ({"a": 8, "b": 3, "c": 8, "d": 2}, r"scheduled: 21 tokens in this step exceed max_num_batched_tokens 20"),
    ({"a": 0, "b": 0, "c": 0, "d": 9}, r"row 3 \(request 'd'\) would write token 4 to block 0, the null block"),
]


def test_a_batch_iterates_over_its_requests_in_the_order_of_rows(batch):
    for name in ("a", "b", "c"):
        batch.add_request(name, [ord(name)])
    batch.swap_rows(0, 2)
    assert [*batch] == [*batch.req_ids] == ["c", "b", "a"]
    assert len(batch) == 3
    assert all(name in batch for name in batch)


@pytest.mark.parametrize(("scheduled", "message"), BAD_STEPS)
def test_a_refused_step_changes_nothing(batch, builder, scheduled, message):
    batch.add_request("a", [1, 2])
    batch.add_request("b", [3, 4], 5)
    batch.add_request("c", range(10, 18), 22)
    batch.add_request("d", [20, 0, 21], 8)
    batch.rollback("d", 8)  # the batch knows of no window that has passed block 0
    before = core_state(batch)
    arenas = [array.tobytes() for m in builder._assembly.eager.metadata for array in m._arrays.values()]
    with pytest.raises((ValueError, TypeError), match=message):
        builder.build(scheduled)
    assert core_state(batch) == before
    assert arenas == [array.tobytes() for m in builder._assembly.eager.metadata for array in m._arrays.values()]
    assert builder.build({"a": 8, "c": 0, "d": 2}).num_tokens == 11


def test_a_decode_into_the_null_block_is_refused(batch, builder):
    batch.add_request("a", [7, 0, 8], 8)
    batch.rollback("a", 5)
    assert builder.build().slot_mapping.tolist() == [31]
    for _ in range(2):  # by the fast path and by the arranged one
        with pytest.raises(ValueError, match=r"row 0 \(request 'a'\) would write token 4 to block 0"):
            builder.build()
        batch._core.state.dirty = True


def test_a_chunk_that_starts_in_the_cached_block_still_meets_the_null_block(batch, builder):
    batch.add_request("a", [7, 0, 8], 8)
    batch.rollback("a", 7)
    builder.build()  # block 7 is cached now
    with pytest.raises(ValueError, match="would write token 4 to block 0"):
        builder.build({"a": 5})


def test_passed_null_blocks_are_legal(batch, builder):
    batch.add_request("a", [0, 0, 9], 8)
    metadata = builder.build()
    assert metadata.slot_mapping.tolist() == [36]
    assert metadata.block_table[0, :3].tolist() == [0, 0, 9]


def test_a_replaced_block_is_not_taken_from_the_cache(batch, builder):
    batch.add_request("a", [1, 2], 4)
    assert builder.build().slot_mapping.tolist() == [8]
    batch.rollback("a", 1)
    assert batch.truncate_blocks("a", 1) == [2]
    batch.append_blocks("a", [50])
    assert builder.build().slot_mapping.tolist() == [200]


def test_a_length_that_is_no_multiple_of_the_block_is_a_limit_still(batch, builder):
    batch.add_request("a", range(1, 9), 29)
    builder.build()
    assert batch.needs_block() == []
    with pytest.raises(ValueError, match=r"30 computed tokens and 1 more exceed max_model_len 30"):
        builder.build()


def test_the_batch_is_full_at_its_capacity_and_has_room_after_a_removal(batch, builder):
    for name in "abcd":
        batch.add_request(name, [1, 2])
    with pytest.raises(ValueError, match="no row for 'e'; the batch holds max_num_reqs 4"):
        batch.add_request("e", [1])
    assert batch.remove_request("b") == [1, 2]
    assert batch.add_request("b", [3]) == 1  # the name and the row are free again
    assert builder.build().req_ids == ("a", "b", "c", "d")


class Shifty:
    """A name that equals another one when ``answers`` says so."""

    answers = itertools.cycle([False, True])

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return next(Shifty.answers)


def test_names_that_lie_about_being_equal_do_not_overfill_the_batch(batch, builder, monkeypatch):
    monkeypatch.setattr(Shifty, "answers", itertools.cycle([False, True]))  # no duplicate, then the other's key
    names = [Shifty() for _ in range(4)]
    assert [batch.add_request(name, [row + 1]) for row, name in enumerate(names)] == [0, 1, 2, 3]
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^req_id: "):
            batch.add_request(Shifty(), [9])
        assert (batch.num_reqs, len(batch), batch.num_rows) == (4, 4, 4)
    assert builder.build().num_reqs == 4
    Shifty.answers = iter([True, False])  # found, then lost
    assert batch.remove_request(Shifty()) == [4]
    assert batch.num_reqs == 3
    assert batch.add_request("a", [4]) == 3
    assert builder.build().slot_mapping.tolist() == [5, 9, 13, 16]


def test_a_preempted_request_sits_out_until_it_has_blocks(batch, builder):
    batch.add_request("a", [1, 2], 3)
    batch.add_request("b", [3, 4], 3)
    assert batch.preempt("a") == [1, 2]
    assert batch.needs_block() == []
    assert builder.build().req_ids == ("b",)
    batch.append_blocks("a", [5])
    metadata = builder.build({"a": 3})
    assert metadata.req_ids == ("b", "a")
    assert metadata.slot_mapping.tolist() == [16, 20, 21, 22]


def test_a_request_named_with_zero_has_no_row(batch, builder):
    for name in "abc":
        batch.add_request(name, [1, 2], 1)
    metadata = builder.build({"a": 0})
    assert set(metadata.req_ids) == {"b", "c"}
    assert len(metadata.moves) == 1
    assert set(builder.build().req_ids) == {"a", "b", "c"}
    assert batch.num_computed_tokens("a") == 2


def test_an_empty_batch_builds_an_empty_step(batch, builder):
    metadata = builder.build()
    assert (metadata.num_reqs, metadata.num_tokens, metadata.max_seq_len) == (0, 0, 0)
    assert metadata.query_start_loc.tolist() == [0]
    assert metadata.slot_mapping.shape == (0,)
    assert metadata.prefill_metadata is None
    assert metadata.decode_metadata is None


def test_arriving_prompts_move_no_row(batch, builder):
    batch.add_request("a", [1, 2], 1)
    batch.add_request("b", [3, 4], 1)
    builder.build()
    batch.add_request("c", [5, 6])
    metadata = builder.build({"c": 5})
    assert metadata.moves == ()
    assert metadata.req_ids == ("a", "b", "c")
    assert builder.build().moves == ()


def test_rows_move_by_the_fewest_swaps(kernels):
    """Against a search over all orders: the number of swaps is that of the cheapest legal order."""
    rng = np.random.default_rng(5)
    for _ in range(60):
        n = int(rng.integers(2, 7))
        batch = InputBatch(max_num_reqs=n, max_model_len=8, block_size=4, kernels=kernels)
        builder = MetadataBuilder(batch, max_num_batched_tokens=64)
        for i in range(n):
            batch.add_request(i, [1, 2])
        wanted = rng.integers(0, 3, n)
        kinds = [0 if w == 1 else 1 if w == 2 else 2 for w in wanted]
        moves = builder.build({i: int(w) for i, w in enumerate(wanted)}).moves
        assert len(moves) == fewest_swaps(kinds)


def fewest_swaps(kinds):
    """Breadth first over orders of kinds."""
    goal, seen, frontier, depth = sorted(kinds), {tuple(kinds)}, [tuple(kinds)], 0
    while list(goal) not in [list(order) for order in frontier]:
        depth += 1
        reached = []
        for order in frontier:
            for i in range(len(order)):
                for j in range(i + 1, len(order)):
                    swapped = list(order)
                    swapped[i], swapped[j] = swapped[j], swapped[i]
                    if tuple(swapped) not in seen:
                        seen.add(tuple(swapped))
                        reached.append(tuple(swapped))
        frontier = reached
    return depth


def test_arenas_rotate(batch, builder):
    batch.add_request("a", [1, 2, 3])
    first = builder.build()
    slots = first.slot_mapping
    second = builder.build()
    assert second is not first
    assert slots.tolist() == [4]  # the first step's arena is untouched by the second
    assert builder.build() is first


def test_views_follow_the_size_of_the_step(batch, builder):
    batch.add_request("a", [1, 2], 1)
    assert builder.build().slot_mapping.shape == (1,)
    assert builder.build().slot_mapping.shape == (1,)
    batch.add_request("b", [3, 4], 1)
    assert builder.build().slot_mapping.shape == (2,)
    assert builder.build().slot_mapping.shape == (2,)


def test_a_second_thread_is_refused(batch, builder):
    batch.add_request("a", [1, 2])
    problems = []

    def intrude():
        for call in (lambda: builder.build(), lambda: batch.add_request("b", [3]), lambda: batch.rollback("a", 0)):
            try:
                call()
            except ConcurrentUseError as error:
                problems.append(str(error))

    class Intruder(dict):
        """A mapping whose items() lets another thread in, in the middle of a build."""

        def items(self):
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
            return super().items()

    builder.build()  # from now on an intruder's build would take the short way
    builder.build(Intruder(a=1))
    assert len(problems) == 3
    assert builder.build().num_reqs == 1


def test_memory_is_stated(batch, builder):
    assert batch.nbytes >= batch.block_table.nbytes + 16 * 4
    assert builder.nbytes % 128 == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_reqs": 0, "max_model_len": 8, "block_size": 4}, "max_num_reqs: 0 is below 1"),
        ({"max_num_reqs": 1, "max_model_len": 2**31, "block_size": 4}, "max_model_len: 2147483648 does not fit int32"),
        ({"max_num_reqs": 1, "max_model_len": 2**31 - 1, "block_size": 16}, "in blocks of 16 does not fit int32"),
        ({"max_num_reqs": 4096, "max_model_len": 2**30, "block_size": 16}, "rows of 67108864 blocks do not fit"),
        ({"max_num_reqs": 1, "max_model_len": 8, "block_size": 4, "num_blocks": 0}, "num_blocks: 0 is below 1"),
        ({"max_num_reqs": 1, "max_model_len": 8, "block_size": 4.0}, "block_size: 4.0 is not an integer"),
    ],
)
def test_bad_capacities_name_themselves(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        InputBatch(**arguments)


def test_a_builder_names_its_bad_arguments(batch):
    with pytest.raises(ValueError, match="max_num_batched_tokens: 0 is below 1"):
        MetadataBuilder(batch, max_num_batched_tokens=0)
    with pytest.raises(ValueError, match="depth: 0 is below 1"):
        MetadataBuilder(batch, max_num_batched_tokens=1, depth=0)
