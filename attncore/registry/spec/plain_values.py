"""Values of a spec as exact Python values: what is read from a plugin once, and never asked again.

A plugin may hand over objects of its own, such as a subclass of str or of dict whose methods raise. Each function reads
such an object and returns an exact str, int, tuple or list, or raises ValueError that begins with the field's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from attncore.arguments import integer_or_none
from attncore.quoted import MAX_ITEMS, plain_text, quoted

MOST = 2**63 - 1
"""The largest integer that a spec may hold; Python refuses to print one of thousands of digits."""


def positive(field: str, value: object) -> int:
    """``value`` as an int from 1 to MOST."""
    number = integer_or_none(value)
    if number is None or number < 1:
        raise ValueError(f"{field}: {quoted(value)} is not a positive integer")
    if number > MOST:
        raise ValueError(f"{field}: an integer of {number.bit_length()} bits; at most {MOST} is accepted")
    return number


def collection(field: str, value: object, wrong: str) -> tuple[object, ...]:
    """The items of a collection that is no string; ``wrong`` is what is said of another value."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {quoted(value)} is {wrong}")
    return _bounded(field, value)


def mapping(field: str, value: object, wrong: str) -> list[tuple[str, object]]:
    """The items of a mapping whose keys are strings."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: {quoted(value)} is {wrong}")
    return [(text(field, key, "not a name"), value[key]) for key in _bounded(field, value)]


def text(field: str, value: object, wrong: str) -> str:
    """``value`` as a str."""
    plain = plain_text(value)
    if plain is None:
        raise ValueError(f"{field}: {quoted(value)} is {wrong}")
    return plain


def plain_scalar(value: object) -> Any:
    """An int, a float or a str of a subclass as one of the class itself; any other value as it is."""
    for kind in (int, float, str):
        if isinstance(value, kind) and type(value) is not bool:
            return _EXACT[kind](value)
    return value


_EXACT: Mapping[type, Callable[[Any], object]] = {int: int.__int__, float: float.__float__, str: str.__str__}


def _bounded(field: str, value: Iterable[object]) -> tuple[object, ...]:
    items = tuple(islice(value, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise ValueError(f"{field}: more than {MAX_ITEMS} items")
    return items
