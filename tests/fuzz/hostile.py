"""Recipes for values that break what Python's protocols promise, and strategies that draw them.

A recipe makes a new object each time, so that two implementations can be given one each. It is called with a function
that the object calls when it is read: a test calls the batch or the builder again from there. What the objects do is in
``lying_objects``.
"""

import array
from typing import NamedTuple

import numpy as np
from fuzz.lying_objects import (
    AsArray,
    Compares,
    FakeBool,
    FromObject,
    Ids,
    Index,
    Int,
    Items,
    Name,
    Once,
    Pairs,
    Stop,
    growing,
    released,
    shrinking,
)
from hypothesis import strategies as st


def nothing():
    pass


class Recipe(NamedTuple):
    text: str
    make: object

    def __call__(self, call=nothing):
        return self.make(call)

    def __repr__(self):
        return self.text


def fixed(value):
    """The recipe of a value that is the same each time."""
    return Recipe(repr(value), lambda call: value)


BIG = (
    2**31 - 1,
    2**31,
    2**32,
    2**32 + 1,
    2**63 - 1,
    2**63,
    2**64 + 1,
    -1,
    -(2**31),
    -(2**31) - 1,
    -(2**63) - 1,
    10**30,
)

INTEGERS = [
    *map(fixed, BIG),
    *map(fixed, (None, True, False, 1.0, 1.5, float("nan"), "1", b"1", (), [1], {}, 1j)),
    *map(fixed, (np.int8(-3), np.uint64(2**64 - 1), np.int64(1), np.bool_(True), np.float32(2), np.array(1))),
    *map(
        fixed,
        (np.array(True), np.array(2.0), np.array([1]), np.array("1"), np.datetime64(3, "D"), np.timedelta64(1, "D")),
    ),
    Recipe("Index(1)", lambda call: Index(call, 1)),
    Recipe("Index(1, then 2**31 - 1)", lambda call: Index(call, 1, 2**31 - 1)),
    Recipe("Index(1, 1, then 2**40)", lambda call: Index(call, 1, 1, 2**40)),
    Recipe("Index(1, 1, then -5)", lambda call: Index(call, 1, 1, -5)),
    Recipe("Index raises", lambda call: Index(call, FromObject)),
    Recipe("Index stops", lambda call: Index(call, Stop)),
    Recipe("Index(1, then stops)", lambda call: Index(call, 1, Stop)),
    Recipe("Compares(2**31)", lambda call: Compares(call, 2**31)),
    Recipe("Compares(1, then -1)", lambda call: Compares(call, 1, -1)),
    Recipe("Int(2)", lambda call: Int(2)),
    Recipe("Int(-7)", lambda call: Int(-7)),
    Recipe("FakeBool", lambda call: FakeBool()),
]
"""Where one integer belongs."""

SEQUENCES = [
    *map(
        fixed,
        (None, 7, 1.5, "12", b"\1\2", bytearray(b"\1"), range(3), {1: 2}, {1}, [[1]], [None], [1.0], [True], [""]),
    ),
    *(Recipe(f"[{item}]", lambda call, item=item: [1, item(call)]) for item in INTEGERS),
    *(
        Recipe(f"array({dtype})", lambda call, dtype=dtype: np.array([1, 2], dtype))
        for dtype in ("i1", "u1", "i2", ">i4", "<i4", "u4", ">i8", "u8", "f4", "f8", "?", "O", "S1", "U1", "c8", "m8")
    ),
    Recipe("array[::2]", lambda call: np.arange(1, 9, dtype=np.int32)[::2]),
    Recipe("array[::-1]", lambda call: np.arange(1, 5, dtype=np.int64)[::-1]),
    Recipe("array of one stride", lambda call: np.broadcast_to(np.int32(1), (4,))),
    Recipe("array 0-d", lambda call: np.array(3)),
    Recipe("array 2-d", lambda call: np.ones((2, 2), np.int32)),
    Recipe("array of none", lambda call: np.empty((0,), np.int64)),
    Recipe("array read-only", lambda call: np.frombuffer(b"\1\0\0\0\2\0\0\0", np.int32)),
    Recipe("array unaligned", lambda call: np.frombuffer(b"\0\1\0\0\0\2\0\0\0", np.int32, 2, 1)),
    Recipe("array of objects", lambda call: np.array([Index(call, 1, 2**31), Index(call, FromObject)], object)),
    Recipe("array with a mask", lambda call: np.ma.array([1, 2], mask=[0, 1])),
    Recipe("array with fields", lambda call: np.zeros(2, [("a", "i4"), ("b", "i8")])),
    Recipe("array('i')", lambda call: array.array("i", [1, 2])),
    Recipe("array('H')", lambda call: array.array("H", [1, 2])),
    Recipe("array('d')", lambda call: array.array("d", [1, 2])),
    Recipe("array('q', 2**40)", lambda call: array.array("q", [1, 2**40])),
    Recipe("memoryview 2-d", lambda call: memoryview(bytes(16)).cast("i", (2, 2))),
    Recipe("memoryview[::2]", lambda call: memoryview(array.array("i", range(8)))[::2]),
    Recipe("memoryview released", lambda call: released()),
    Recipe("Once", lambda call: Once([1, 2])),
    Recipe("Ids(len 0)", lambda call: Ids([1, 2, 3], 0)),
    Recipe("Ids(len 1000)", lambda call: Ids([1], 1000)),
    Recipe("Ids(len -1)", lambda call: Ids([1], -1)),
    Recipe("Ids(len 2**70)", lambda call: Ids([1], 2**70)),
    Recipe("Ids(len raises)", lambda call: Ids([1], FromObject)),
    Recipe("Ids(len stops)", lambda call: Ids([1], Stop)),
    Recipe("Items(more)", lambda call: Items(call, 1, [1] * 9)),
    Recipe("Items(fewer)", lambda call: Items(call, 9, [1])),
    Recipe("Items(raises)", lambda call: Items(call, 2, [1, FromObject])),
    Recipe("Items(stops)", lambda call: Items(call, 2, [1, Stop])),
    Recipe("AsArray(ints)", lambda call: AsArray(call, np.array([1]))),
    Recipe("AsArray(floats)", lambda call: AsArray(call, np.array([1.5]))),
    Recipe("AsArray(no array)", lambda call: AsArray(call, [1])),
    Recipe("AsArray(raises)", lambda call: AsArray(call, FromObject)),
    Recipe("AsArray(stops)", lambda call: AsArray(call, Stop)),
    *(Recipe(f"shrinking({n})", lambda call, n=n: shrinking(call, n)) for n in (2, 100)),
    *(Recipe(f"growing({n})", lambda call, n=n: growing(call, n)) for n in (2, 100)),
]
"""Where a sequence of integers belongs."""

NAMES = [
    *map(fixed, (None, "", 0, 1.0, True, (), (1, "a"), float("nan"), b"x", frozenset())),
    Recipe("a list", lambda call: ["unhashable"]),
    Recipe("Name(raises)", lambda call: Name((FromObject,))),
    Recipe("Name(hash, then raises)", lambda call: Name((1, 1, FromObject))),
    Recipe("Name(changes)", lambda call: Name((1, 2, 3, 4))),
    Recipe("Name(equal to all)", lambda call: Name((hash("r0"),))),
    Recipe("Name(== raises)", lambda call: Name((hash("r0"),), FromObject)),
    Recipe("Name(not itself)", lambda call: Name((5,), False)),
]
"""Where a request's name belongs."""


def mappings(key):
    """Where a mapping from ``key`` belongs."""
    return [
        *map(fixed, (None, 1, "ab", [(key, 1)], {key}, {None: 1}, {key: None})),
        *(Recipe(f"{{{key!r}: {item}}}", lambda call, item=item: {key: item(call)}) for item in INTEGERS + SEQUENCES),
        Recipe("Pairs", lambda call: Pairs(call, [(key, 1)])),
        Recipe("Pairs(empty)", lambda call: Pairs(call, [(key, 1)], 0)),
        Recipe("Pairs(twice)", lambda call: Pairs(call, [(key, 1), (key, 3)])),
        Recipe("Pairs(triples)", lambda call: Pairs(call, [(key, 1, 2)])),
        Recipe("Pairs(unhashable)", lambda call: Pairs(call, [([], 1)])),
        Recipe("Pairs(raises)", lambda call: Pairs(call, FromObject)),
        Recipe("Pairs(stops)", lambda call: Pairs(call, Stop)),
    ]


integers = st.sampled_from(INTEGERS)
sequences = st.sampled_from(SEQUENCES)
names = st.sampled_from(NAMES)
objects = integers | sequences | names


def mostly(good, hostile):
    """``good`` values as recipes four times in five, else ``hostile`` ones."""
    return st.integers(0, 4).flatmap(lambda n: good.map(fixed) if n else hostile)
