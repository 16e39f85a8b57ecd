"""Blocks appended to several requests in one compiled call, beside the longer way that says what is wrong."""

import random

import pytest

from attncore.builder import InputBatch, KVCacheGroup, StateGroup
from attncore.errors import ConcurrentUseError

_slots = pytest.importorskip("attncore._slots", reason="the compiled extension is not installed")
ROWS, BLOCK, WIDTH = 6, 4, 6


def batches(**options):
    """Two batches of the same requests; the second one never takes the short way."""
    pair = [InputBatch(max_num_reqs=ROWS, max_model_len=BLOCK * WIDTH, kernels="cython", **options) for _ in range(2)]
    pair[1]._append_plain = None
    return pair


def state_of(batch):
    core = batch._core
    tables = [(table.array.tolist(), table._lengths.tolist()) for table in core.decoders]
    return batch.req_ids, tables, sorted(core.order.paused), core.state.busy, core.state.unfinished


def answer(batch, method, arguments):
    try:
        return getattr(batch, method)(*arguments)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


class Equal:
    """A name that equals another one, and says so by code of its own."""

    def __init__(self, name, then=lambda: None):
        self.name, self.then = name, then

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        self.then()
        return other == self.name


def some_ids(rng):
    ids = [rng.randrange(1, 40) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
    if rng.random() < 0.1:
        ids += rng.choice([[0], [-1], [100], [1 << 40], [True], [2.0], ["x"], [None], ids, [7] * (WIDTH + 1)])
    return rng.choice([ids, ids, ids, tuple(ids)])


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_any_calls_have_the_same_effect_and_answer(kernel_blocks):
    rng = random.Random(kernel_blocks)
    group = {"block_size": BLOCK, "num_blocks": 41}
    if kernel_blocks > 1:
        group = {"groups": [KVCacheGroup("all", BLOCK, kernel_block_size=BLOCK // kernel_blocks, num_blocks=41)]}
    first, second = batches(**group)
    short = 0
    for step in range(3000):
        name = rng.choice([*range(4), "a", "b", "c", 1 << 70])
        kind = rng.random()
        if kind < 0.1:
            method, arguments = "add_request", (name, [rng.randrange(1, 40)])
        elif kind < 0.15:
            method, arguments = "remove_request", (name,)
        elif kind < 0.18:
            method, arguments = "preempt", (name,)
        else:
            names = rng.sample([*range(4), "a", "b", "c"], rng.randrange(0, 4))
            method, arguments = "append_blocks_many", ({name: some_ids(rng) for name in names},)
            short += first._append_plain is not None and bool(names)
        assert answer(first, method, arguments) == answer(second, method, arguments), step
        assert state_of(first) == state_of(second), step
    assert short > 1000 or kernel_blocks > 1


GROUPS = [
    KVCacheGroup("full", BLOCK, num_blocks=41),
    KVCacheGroup("window", BLOCK * 2, sliding_window=9, num_blocks=41),
]
ODD = (["full"], {"other": [3]}, {3: [3]}, {"full": (3,), "window": [4]}, {Equal("full"): [5]}, {"states": [2]}, None)


def by_group(rng, groups):
    if rng.random() < 0.1:
        return rng.choice(ODD)
    return {group.name: some_ids(rng) for group in rng.sample(groups, rng.randrange(len(groups) + 1))}


@pytest.mark.parametrize("states", [False, True])
def test_calls_by_group_have_the_same_effect_and_answer(states):
    rng, more = random.Random(5), [StateGroup("states", 9)] if states else []
    first, second = batches(groups=[*GROUPS, *more])
    short = 0
    for step in range(3000):
        name = rng.choice([*range(4), "a", "b", "c"])
        kind = rng.random()
        if kind < 0.1:
            ids = {group.name: [rng.randrange(1, 40)] for group in GROUPS} | ({"states": [3]} if states else {})
            method, arguments = "add_request", (name, ids)
        elif kind < 0.15:
            method, arguments = "remove_request", (name,)
        elif kind < 0.155:
            method, arguments = "preempt", (name,)
        else:
            names = rng.sample(first.req_ids, rng.randrange(min(4, len(first.req_ids) + 1)))
            names += ["a"] * (rng.random() < 0.1)
            method, arguments = "append_blocks_many", ({name: by_group(rng, GROUPS) for name in names},)
            short += first._append_plain({name: {} for name in names})
        assert answer(first, method, arguments) == answer(second, method, arguments), step
        assert state_of(first) == state_of(second), step
    assert short > 200


def plain(batch):
    core = batch._core
    return lambda given: _slots.append_blocks(core.state, core.decoders[0].state, core.order, given)


def test_what_is_plain_takes_the_short_way():
    batch, _ = batches(block_size=BLOCK)
    for name in ("a", "b"):
        batch.add_request(name, [])
    assert plain(batch)({"a": [1, 2], "b": [3]})
    assert batch.block_ids("a") == [1, 2]
    assert not plain(batch)({})
    for given in ({"a": [3], "z": [4]}, {"a": [3], "b": [0]}, {"b": [5], "a": [2]}, {"a": (5,)}, {Equal("a"): [5]}):
        assert not plain(batch)(given), given
    assert batch.block_ids("a") == [1, 2]
    assert batch.block_ids("b") == [3]


def test_a_call_inside_another_takes_the_longer_way_and_is_refused():
    batch, _ = batches(block_size=BLOCK)
    batch.add_request("a", [1])
    with batch._core.enter():
        assert not plain(batch)({"a": [2]})
    assert plain(batch)({"a": [2]})


def preempts(batch, given):
    batch.preempt(1)


def replaces_a_list(batch, given):
    given[1] = -5


def exchanges_names(batch, given):
    del given[1]
    given[3] = [9]


def empties(batch, given):
    given.clear()


@pytest.mark.parametrize("change", [preempts, replaces_a_list, exchanges_names, empties])
@pytest.mark.parametrize("last", [[6], [0]], ids=["right", "wrong"])
def test_a_name_whose_comparison_runs_code_is_left_to_the_longer_way(change, last):
    """Both kernels answer alike, whatever that code does: an append reads what is given once."""
    answers = []
    for batch in batches(block_size=BLOCK):
        odd = Equal(1)
        for name in (odd, 11, 2, 3):
            batch.add_request(name, [])
        given = {1: [5], 2: last}
        once = iter([change])
        odd.then = lambda once=once, batch=batch, given=given: [change(batch, given) for change in once]
        try:
            answers.append(batch.append_blocks_many(given))
        except (ConcurrentUseError, RuntimeError, TypeError, ValueError) as error:
            answers.append((type(error), str(error)))
        answers.append([batch.block_ids(name) for name in (odd, 11, 2, 3)])
        assert not batch._core.state.busy
    assert answers[:2] == answers[2:]


def test_a_batch_that_has_had_an_odd_name_takes_the_longer_way():
    batch, _ = batches(block_size=BLOCK)
    batch.add_request("a", [1])
    assert plain(batch)({"a": [2]})
    odd = Equal("odd")
    batch.add_request(odd, [3])
    assert not plain(batch)({"a": [4]})
    batch.remove_request(odd)
    assert not plain(batch)({"a": [4]})
    assert batch.block_ids("a") == [1, 2]
