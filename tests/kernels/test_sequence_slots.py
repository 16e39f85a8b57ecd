"""append_slots, the compiled way of compute_slot_mapping: what it takes, and what it leaves to the longer way."""

import random

import numpy as np
import pytest

from attncore import slots
from attncore.kernels import host_functions

_slots = pytest.importorskip("attncore._slots", reason="the compiled extension is not installed")


def answer(call, *words):
    out = [7]
    try:
        call(words[0], out, *words[1:])
    except (TypeError, ValueError) as error:
        return type(error), str(error), out
    return out


def test_both_ways_agree(monkeypatch):
    rng, taken = random.Random(5), 0
    for _ in range(3000):
        context, size = rng.randrange(40), rng.choice([1, 2, 3, 4, 16])
        stop = context + rng.randrange(0, 30)
        table = [
            rng.choice([rng.randrange(99), rng.randrange(1 << 29), (1 << 30) - 1]) for _ in range(rng.randrange(0, 40))
        ]
        if table and rng.random() < 0.2:
            table[rng.randrange(len(table))] = rng.choice([-1, 1 << 31, 1 << 40, 2.5, True, None])
        elif rng.random() < 0.4:
            table = np.array(table, rng.choice([np.int32, np.int64]))
        words = rng.random() < 0.1, 3, stop, context, rng.choice([0, 0, context + 2, stop + 5]), size, {3: table}
        out = [7]
        taken += _slots.append_slots(words[0], out, *words[1:])
        monkeypatch.setattr(host_functions, "_compiled", host_functions._does_nothing)
        longer = answer(slots.compute_slot_mapping, *words)
        monkeypatch.setattr(host_functions, "_compiled", None)
        assert answer(slots.compute_slot_mapping, *words) == longer
        assert out in ([7], longer)
    assert taken > 1000


@pytest.mark.parametrize(
    "words",
    [
        (1, 3, 5, 0, 0, 4, {3: [1, 2]}),
        (True, 3, 5, 5, 0, 4, {}),
        (False, 3, 5, 0, 0, 4, {3: np.array([1, 2], np.uint32)}),
        (False, 3, 5, 0, 0, 4, {3: np.array([1, 2, 3, 4])[::2]}),
        (False, 3, 5, 0, 0, 4, {3: np.array([1, -2])}),
        (False, 3, 9, 0, 0, 4, {3: np.array([1, 2], np.int32)}),
        (False, 3, 5, 0, 0, 4, {3: (1, 2)}),
        (False, 3, 5, 0, 0, 4, {4: [1, 2]}),
        (False, 3, 9, 0, 0, 4, {3: [1, 2]}),
        (False, 3, 5, 5, 0, 4, {3: [1, 2]}),
        (False, 3, True, 0, 0, 4, {3: [1, 2]}),
        (False, 3, 5, 0, 0, 0, {3: [1, 2]}),
        (False, 3, 5, 0, -1, 4, {3: [1, 2]}),
        (False, 3, (1 << 24) + 1, 0, 1 << 25, 4, {3: [1, 2]}),
    ],
)
def test_what_is_not_plain_is_left_to_the_longer_way(words):
    out = []
    assert not _slots.append_slots(words[0], out, *words[1:])
    assert out == []


def test_a_name_whose_comparison_changes_the_table_is_read_afterwards():
    table = [1, 2]

    class Three:
        def __hash__(self):
            return hash(3)

        def __eq__(self, other):
            table.clear()
            return other == 3

    out = []
    assert not _slots.append_slots(False, out, 3, 5, 0, 0, 4, {Three(): table})
    assert out == []


def test_numba_is_not_loaded_for_it(monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", "numba")
    monkeypatch.setattr(host_functions, "_compiled", None)
    out = []
    slots.compute_slot_mapping(False, out, 3, 5, 0, 0, 4, {3: [1, 2]})
    assert out == [4, 5, 6, 7, 8]
    assert host_functions._compiled is host_functions._does_nothing
    monkeypatch.setattr(host_functions, "_compiled", None)


def test_the_table_may_be_the_list_that_slots_are_appended_to():
    table = [1, 2]
    assert _slots.append_slots(False, table, 3, 6, 1, 0, 4, {3: table})
    assert table == [1, 2, 5, 6, 7, 8, 9]
    assert not _slots.append_slots(False, table, 3, 29, 1, 0, 4, {3: [1, 2, 3, 4, 5, 6, 7, -1]})
    assert table == [1, 2, 5, 6, 7, 8, 9]


def test_a_look_without_memory_is_made_again(monkeypatch):
    words = False, [], 1, 2, 0, 0, 4, {1: [3]}
    monkeypatch.setenv("ATTNCORE_KERNELS", "cython")
    monkeypatch.setattr(host_functions, "_compiled", None)
    with monkeypatch.context() as without:
        without.setattr(host_functions.importlib, "import_module", lambda name: bytearray(1 << 62))
        with pytest.raises(MemoryError):
            slots.compute_slot_mapping(*words)
    slots.compute_slot_mapping(*words)
    assert host_functions._compiled is _slots.append_slots
