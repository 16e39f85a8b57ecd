"""Reading block ids of Python objects."""

from __future__ import annotations

from array import array as array_of_ints
from itertools import islice
from typing import Any

import numpy as np

from attncore.arguments import UNREADABLE, integer_or_none, why_no_list


def read_int(value: Any) -> int | None:
    """An integer of 64 bits, None for an object that is none. An item's __index__ is called once."""
    number = integer_or_none(value)
    return number if number is not None and -(2**63) <= number < 2**63 else None


def check_row(row: int, capacity: int) -> None:
    if not 0 <= row < capacity:
        raise IndexError(row)


def readable(ids: Any) -> Any:
    """What read_ids takes of a row: a list, or a one-dimensional int32 or int64 array; None where it is no row."""
    if type(ids) is list or (type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype in (np.int32, np.int64)):
        return ids
    if why_no_list(ids) is not None or not hasattr(
        ids, "__len__"
    ):  # an iterator can be read only once, and a refusal reads it again
        return None
    try:
        return list(ids)
    except UNREADABLE:
        return None


def exceeds(ids: Any, most: int) -> bool:
    """Whether there are more ids than most: what is no list is read as one, which takes time and memory."""
    try:
        return len(ids) > most
    except UNREADABLE:
        return False  # readable says what it is
    except RuntimeError:  # of a nested tensor, say; another one is the caller's own
        if why_no_list(ids) is None:
            raise
        return False


def read_ids(row: Any, limit: int) -> Any:
    """Block ids 0 <= id < limit of a ``readable`` row as an int32 array; None where one is bad."""
    if type(row) is not list:
        return None if row is None else read_buffer(row, limit)
    if set(map(type, row)) <= {int}:
        try:
            return read_buffer(np.asarray(array_of_ints("q", row)), limit)
        except OverflowError:
            return None
    items: list[int] = []
    for item in islice(row, len(row)):  # of the list itself: an item's __index__ may empty it, and in C that is seen
        value = read_int(item)
        if value is None or not 0 <= value < limit:
            return None
        items.append(value)
    return np.array(items, np.int32)


def read_buffer(array: Any, limit: int) -> Any:
    array = array.astype(np.int64)  # a copy: the caller's may change between the check and the use
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= limit):
        return None
    return array.astype(np.int32)
