"""The layout of CPython's lists, tuples and ints, and of NumPy's arrays, for a loop that reads many in one call.

numba reads a list by copying it, item by item, through objects. NumPy and ``array`` take as long for the ints of a step
as plain Python does for all of it. What is assumed of the layout is checked on objects first (``find_layout``): where
an interpreter has another one, there is no layout, and Python reads its own objects.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from typing import Any, NamedTuple

import numpy as np

from attncore.arguments import INT32_MAX
from attncore.kernels.numba.jit import jit
from attncore.kernels.numba.memory import LENGTH, SLOT, lengths_at, longs_at, wide

WORD, DIGIT_BITS = 8, 30
TYPE, SIZE, ITEMS = 1 * WORD, 2 * WORD, 3 * WORD
"""Where an object has its type; a list or tuple, how many items it has; a list, the address of its items. Bytes."""
DIGITS = 3 * WORD
"""Where an int has its digits, the lowest first; the word before them says how many they are, and its sign."""

DATA, DIMENSIONS, SHAPE, STRIDES, DTYPE, FLAGS = (k * WORD for k in (2, 3, 4, 5, 7, 8))
"""Where an array has the address of its items, their number of dimensions, the addresses of the shape and the strides,
its dtype and its flags (NumPy's ``PyArrayObject_fields``). The numbers of dimensions and the flags are ints of C.
"""
ALIGNED = 0x100
"""The flag of arrays whose items are aligned."""


class Layout(NamedTuple):
    """What differs between versions: where a tuple's items begin, and the word before the digits of an int."""

    tuple_items: int
    no_digit: int
    one_digit: int
    two_digits: int


def _words(value: Any, count: int) -> list[int]:
    """The first words of an object."""
    return list((ctypes.c_int64 * count).from_address(id(value)))


def _has_known_sizes() -> bool:
    """Whether this can be an interpreter whose objects may be read: nothing of them is read before."""
    return (
        sys.implementation.name == "cpython"
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and not sysconfig.get_config_var("Py_TRACE_REFS")
        and ctypes.sizeof(ctypes.c_void_p) == WORD
        and sys.int_info[:2] == (DIGIT_BITS, 4)
        and (object.__basicsize__, list.__basicsize__, int.__basicsize__) == (16, 40, 24)
        and tuple.__basicsize__ in (24, 32)
    )


def find_layout() -> Layout | None:
    """The interpreter's layout, None where objects are not as this module says."""
    if not _has_known_sizes():
        return None
    items = [[1], (2,), 3, "four", 5.0]
    many, first, size = _words(items, 4), TYPE // WORD, SIZE // WORD
    held = _words(tuple(items), tuple.__basicsize__ // WORD + len(items))
    ids = [id(item) for item in items]
    if (many[first], many[size], held[first], held[size]) != (id(list), len(items), id(tuple), len(items)):
        return None
    if held[-len(items) :] != ids or not many[3] or list((ctypes.c_int64 * len(items)).from_address(many[3])) != ids:
        return None
    tags = [_words(value, 3)[2] for value in (0, 1, 1 << DIGIT_BITS, -1, 1 << 2 * DIGIT_BITS)]
    layout = Layout(tuple.__basicsize__, *tags[:3])
    return layout if len({*tags}) == len(tags) and all(layout_reads(layout, value) for value in PROBES) else None


def arrays_are_known() -> bool:
    """Whether arrays are as this module says: a part of one, one with two dimensions, and one that runs backwards."""
    if not _has_known_sizes() or np.ndarray.__basicsize__ < FLAGS + WORD:
        return False
    whole = np.arange(12, dtype=np.int32)
    return all(map(_array_is_known, (whole[1:5], whole.reshape(3, 4)[:, 1:3], whole.astype(np.int64)[::-2])))


def _array_is_known(array: Any) -> bool:
    words = _words(array, FLAGS // WORD + 1)
    found = {name: words[name // WORD] for name in (TYPE, DATA, DTYPE)}
    if found != {TYPE: id(np.ndarray), DATA: array.ctypes.data, DTYPE: id(array.dtype)}:
        return False
    dimensions, flags = (words[name // WORD] & 0xFFFF_FFFF for name in (DIMENSIONS, FLAGS))
    if dimensions != array.ndim or bool(flags & ALIGNED) != array.flags.aligned:
        return False
    sides = [list((ctypes.c_int64 * array.ndim).from_address(words[name // WORD])) for name in (SHAPE, STRIDES)]
    return sides == [list(array.shape), list(array.strides)]


PROBES = (0, 1, 7, 255, 256, 65_535, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 40) + 5, (1 << 60) - 1)


def layout_reads(layout: Layout, value: int) -> bool:
    """Whether an int is read right; the same steps as ``read_small_int``, in Python."""
    kind, tag = _words(value, 3)[1:]
    if kind != id(int):
        return False
    if tag == layout.no_digit:
        return value == 0
    count = {layout.one_digit: 1, layout.two_digits: 2}.get(tag, 0)
    digits = (ctypes.c_uint32 * count).from_address(id(value) + DIGITS)
    return count > 0 and value == sum(digit << DIGIT_BITS * k for k, digit in enumerate(digits))


@jit
def read_small_int(view, item):
    """The int from 0 to 2**60 that an object is, -1: it is none. ``view`` has a Layout and ``int_type``."""
    if longs_at(item + TYPE)[0] != view.int_type:
        return -1
    tag = longs_at(item + DIGITS - WORD)[0]
    if tag == view.one_digit:
        return wide(lengths_at(item + DIGITS)[0])
    if tag == view.no_digit:
        return 0
    if tag == view.two_digits:
        return wide(lengths_at(item + DIGITS)[0]) + (wide(lengths_at(item + DIGITS)[1]) << DIGIT_BITS)
    return -1


@jit
def size_of_array(view, array):
    """The number of ids in an array of one dimension, int32 or int64, that lie side by side; -1 of any other array.

    ``view`` has the addresses of these two dtypes, ``int32`` and ``int64``.
    """
    kind = longs_at(array + DTYPE)[0]
    if lengths_at(array + DIMENSIONS)[0] != 1 or not lengths_at(array + FLAGS)[0] & ALIGNED:
        return -1
    if kind != view.int32 and kind != view.int64:
        return -1
    count, stride = longs_at(longs_at(array + SHAPE)[0])[0], longs_at(longs_at(array + STRIDES)[0])[0]
    return count if count < 2 or stride == (LENGTH if kind == view.int32 else SLOT) else -1


@jit
def copy_array(view, array, count, out):
    """Copies block ids; False where one is none. Another thread may write to the array: each id is read once."""
    address, right = longs_at(array + DATA)[0], True
    if longs_at(array + DTYPE)[0] == view.int32:
        for k in range(count):
            block_id = lengths_at(address)[k]
            out[k] = block_id
            right &= block_id >= 0
    else:
        for k in range(count):
            wide_id = longs_at(address)[k]
            out[k] = wide_id
            right &= 0 <= wide_id <= INT32_MAX
    return right
