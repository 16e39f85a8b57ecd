"""What the kernels in numba do in one compiled call: a steady step, and reading groups of lists."""

import contextlib
import gc
import sys
import threading
import types

import numpy as np
import pytest
from interrupted_calls import AtOpcode

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.errors import ConcurrentUseError
from attncore.kernels.numba import jit, objects, sequence_groups
from attncore.kernels.numba.sequence_groups import GroupReader


def built(num_reqs=3, *, depth=2, **options):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels="numba", **options)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, depth=depth)
    for row in range(num_reqs):
        batch.add_request(row, range(1 + 16 * row, 17 + 16 * row), 5 + row)
    return batch, builder


def is_one_call(batch, builder):
    """Builds a step: whether nobody entered the batch for it."""
    entered, state = [], batch._core.state
    enter = type(state).enter
    state.enter = lambda: entered.append(True) or enter(state)
    try:
        builder.build()
    finally:
        del state.enter
    return not entered


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_steady_step_is_one_call(depth):
    batch, builder = built(depth=depth)
    assert not any(is_one_call(batch, builder) for _ in range(depth))
    steps = [is_one_call(batch, builder) for _ in range(2 * depth)]
    assert steps == [True] * (2 * depth)


def another_request(batch, builder):
    batch.remove_request(1)
    batch.add_request("another", range(17, 33), 2)


def a_hole(batch, builder):
    batch.remove_request(0)


def preempted(batch, builder):
    batch.preempt(0)
    batch.append_blocks(0, [60, 61])


def without_one(batch, builder):
    builder.build({1: 0})


def with_a_prefill(batch, builder):
    builder.build({0: 3})


CHANGES = [another_request, a_hole, preempted, without_one, with_a_prefill]


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_a_change_is_not_that_of_the_rows_before(change):
    """Names, moves and cached views follow: those of the twin do."""
    sides = [built()]
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels="cython")
    sides.append((batch, MetadataBuilder(batch, max_num_batched_tokens=32)))
    for row in range(3):
        batch.add_request(row, range(1 + 16 * row, 17 + 16 * row), 5 + row)
    for _ in range(4):
        for _, builder in sides:
            assert builder.build().slot_mapping.size
    for batch, builder in sides:
        change(batch, builder)
    for _ in range(4):
        left, right = (builder.build() for _, builder in sides)
        assert (left.req_ids, left.moves, left.num_tokens) == (right.req_ids, right.moves, right.num_tokens)
        for name in ("slot_mapping", "positions", "seq_lens", "query_start_loc", "paged_kv_indices"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name), name)


def test_a_steady_step_inside_another_call_is_refused():
    batch, builder = built()
    for _ in range(4):
        builder.build()
    step = builder.last_step
    with batch._core.enter(), pytest.raises(ConcurrentUseError):
        builder.build()
    assert builder.last_step == step
    seen = []

    def build():
        with pytest.raises(ConcurrentUseError):
            builder.build()
        seen.append(True)

    with batch._core.enter():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert seen == [True]
    assert is_one_call(batch, builder)


def test_a_change_that_was_not_undone_is_undone_before_the_next_step():
    batch, builder = built()
    for _ in range(4):
        builder.build()
    undone, state = [], batch._core.state

    def undo():
        undone.append(True)
        if len(undone) == 1:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), state.enter():
        state.undo.append((undo,))
        raise ZeroDivisionError
    assert undone == [True]
    assert state.unfinished
    assert not is_one_call(batch, builder)
    assert undone == [True, True]
    assert is_one_call(batch, builder)


def test_a_steady_step_with_encoders():
    groups = [KVCacheGroup("decoder", 4), KVCacheGroup("encoder", 4, cross=True)]
    seen = []
    for kernels in ("numba", "cython"):
        batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=groups, max_encoder_len=16, kernels=kernels)
        builder = MetadataBuilder(batch, max_num_batched_tokens=32)
        for row in range(2):
            blocks = {"decoder": range(1 + 16 * row, 17 + 16 * row), "encoder": [90 + 2 * row, 91 + 2 * row]}
            batch.add_request(row, blocks, 5, encoder_seq_len=7)
        steps = []
        for _ in range(5):
            metadata = builder.build()
            slots = metadata.host.cross_slot_mapping.tolist()
            steps.append((metadata.encoder_query_lens.tolist(), metadata.encoder_seq_lens.tolist(), slots))
        seen.append(steps)
    assert seen[0] == seen[1]
    assert [step[0] for step in seen[0]] == [[7, 7], *[[0, 0]] * 4]
    assert [len(step[2]) for step in seen[0]] == [14, 0, 0, 0, 0]


def group(*tables, is_prompt=False, hit=False, more=()):
    return (is_prompt, [(k, 1, 5, table) for k, table in enumerate(tables)], hit, *more)


def both_ways(groups):
    """What a reader has read in one call, and what it reads object by object; None where it does not."""
    found = []
    for read in (GroupReader.read, GroupReader._read_objects):
        reader = GroupReader()
        if not read(reader, groups):
            found.append(None)
            continue
        found.append(
            (reader.num_seqs, reader.num_ids, reader.encoder_group, reader.entries.tolist(), reader.ids.tolist())
        )
    return found


class Named(tuple):
    __slots__ = ()


BIG = 2**31
READ_IN_ONE = {
    "lists": [group([1, 2, 3]), group([4]), group([])],
    "small and large": [group([0, 1, 255, 256, 257, 2**30 - 1, 2**30, 2**31 - 1])],
    "tuples": [group((1, 2)), group([3])],
    "arrays": [group(np.array([1, 2], np.int32)), group(np.array([3], np.int64), [4])],
    "none": [group(None)],
    "two": [group([1], [2]), group([3], [4])],
    "prompts first": [group([1], is_prompt=True, hit=True), group([2])],
    "encoders": [group([1], more=(None, None)), group([2], more=(7, [1]))],
    "a named tuple": [Named(group([1]))],
    "many": [group(list(range(300))) for _ in range(100)],
}
READ_BY_OBJECTS = {
    "an array of other ints": [group(np.array([1, 2], np.uint32))],
    "an array with a gap": [group(np.arange(6, dtype=np.int32)[::2])],
    "a number of NumPy's": [group([np.int64(1), 2])],
    "a bool": [group([1, True])],
    "too large": [group([BIG])],
    "much too large": [group([2**70])],
    "negative": [group([1, -1])],
    "text": [group(["1"])],
    "two kinds": [group([1], is_prompt=True), Named(group([1]))],
    "the same twice": [(False, [(1, 1, 5, [1]), (1, 1, 5, [2])], False)],
    "with and without": [group([1], None)],
    "prompts last": [group([1]), group([1], is_prompt=True)],
    "no bool": [(1, [(0, 1, 5, [1])], False)],
    "no list": [(False, ((0, 1, 5, [1]),), False)],
    "no sequence": [(False, [], False)],
    "a short one": [(False, [(0, 1, 5)], False)],
    "no token": [(False, [(0, 0, 5, [1])], False)],
    "a negative context": [(False, [(0, 1, -5, [1])], False)],
    "an id that is none": [(False, [("a", 1, 5, [1])], False)],
    "nothing": [],
    "no tuple": [[False, [(0, 1, 5, [1])], False]],
    "none at all": [None],
}


@pytest.mark.parametrize("name", READ_IN_ONE)
def test_groups_of_lists_are_read_in_one_call(name):
    groups = READ_IN_ONE[name]
    one, other = both_ways(groups)
    assert one == other
    assert one is not None
    assert GroupReader()._read_in_one(groups)


@pytest.mark.parametrize("name", READ_BY_OBJECTS)
def test_other_groups_are_read_by_their_objects(name):
    groups = READ_BY_OBJECTS[name]
    one, other = both_ways(groups)
    assert one == other
    assert not GroupReader()._read_in_one(groups)


def test_without_a_known_layout_objects_are_read(monkeypatch):
    monkeypatch.setattr(sequence_groups, "find_layout", lambda: None)
    reader = GroupReader()
    assert reader._read_groups is None
    for groups in READ_IN_ONE.values():
        assert reader.read(groups)


@pytest.mark.parametrize(
    ("where", "value"),
    [("list", 48), ("int", 28), ("tuple", 40), ("object", 32)],
)
def test_an_interpreter_of_other_sizes_has_no_layout(monkeypatch, where, value):
    monkeypatch.setitem(vars(objects), where, types.SimpleNamespace(__basicsize__=value))
    assert objects.find_layout() is None


def test_this_interpreter_has_a_layout():
    """Where it has none, lists are read fifty times as slowly: an interpreter to be looked at."""
    known = sys.implementation.name == "cpython" and objects._has_known_sizes()
    assert (objects.find_layout() is not None) == known


def test_a_reader_grows_and_lets_nothing_go():
    reader = GroupReader()
    for count in (1, 100, 5000, 20_000, 3):
        groups = [group(list(range(count))) for _ in range(count % 97 + 1)]
        assert reader._read_in_one(groups)
        gc.collect()
        assert reader.ids.tolist() == list(range(count)) * len(groups)


@pytest.mark.parametrize("count", range(12))
def test_an_interrupt_before_a_loop_is_ready_leaves_one_that_is_called(count):
    function = jit.Entry(lambda value: value + 1, "int64(int64)")
    with AtOpcode(count):
        function.ready()
    assert function(2) == 3
    with pytest.raises(TypeError, match="No matching definition"):
        function(np.zeros(1))


def test_threads_that_need_a_loop_at_once_have_it():
    function, found = jit.Entry(lambda value: value + 1, "int64(int64)"), []
    threads = [threading.Thread(target=lambda: found.append(function(2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3] * 4
