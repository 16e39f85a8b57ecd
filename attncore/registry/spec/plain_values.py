"""Values of a spec as exact Python values: what is read from a plugin once, and never asked again.

A plugin may hand over objects of its own, such as a subclass of str or of dict whose methods raise. Each function reads
such an object and returns an exact str, int, tuple or list, or raises ValueError that begins with the field's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from attncore.arguments import integer_or_none
from attncore.quoted import plain_text, quoted
from attncore.show import counted

MOST = 2**63 - 1
"""The largest integer that a spec may hold; Python refuses to print one of thousands of digits."""
MAX_ENTRIES = 64
"""Entries of a collection of a spec, such as its variants, notes and options."""
MAX_SIZES = 1000
"""Sizes of a set of them; MultipleOf states more."""
MAX_LETTERS = 1000
"""Letters of a text of a spec."""


def positive(field: str, value: object) -> int:
    """``value`` as an int from 1 to MOST."""
    number = integer_or_none(value)
    if number is None or number < 1:
        raise ValueError(f"{field}: {quoted(value)} is not a positive integer")
    if number > MOST:
        raise ValueError(f"{field}: an integer of {number.bit_length()} bits; at most {MOST} is accepted")
    return number


def collection(field: str, value: object, wrong: str, most: int = MAX_ENTRIES) -> tuple[object, ...]:
    """The items of a collection that is no string, at most ``most``; ``wrong`` is what is said of another value."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {quoted(value)} is {wrong}")
    return _bounded(field, value, most)


def mapping(field: str, value: object, wrong: str) -> list[tuple[str, object]]:
    """The items of a mapping whose keys are strings."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: {quoted(value)} is {wrong}")
    return [(text(field, key, "not a name"), value[key]) for key in _bounded(field, value, MAX_ENTRIES)]


def text(field: str, value: object, wrong: str) -> str:
    """``value`` as a str of at most MAX_LETTERS."""
    plain = plain_text(value)
    if plain is None:
        raise ValueError(f"{field}: {quoted(value)} is {wrong}")
    if len(plain) > MAX_LETTERS:
        raise ValueError(f"{field}: a text of {counted(len(plain), 'letter')}; at most {MAX_LETTERS} are accepted")
    return plain


def plain_scalar(field: str, value: object) -> Any:
    """An int, a float or a str of a subclass as one of the class itself; any other value as it is."""
    if isinstance(value, str):
        return text(field, value, "not a text")
    for kind in (int, float):
        if isinstance(value, kind) and type(value) is not bool:
            value = _EXACT[kind](value)
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError(f"{field}: an integer of {value.bit_length()} bits; at most {MOST} is accepted")
    return value


_EXACT: Mapping[type, Callable[[Any], object]] = {int: int.__int__, float: float.__float__}


def _bounded(field: str, value: Iterable[object], most: int) -> tuple[object, ...]:
    items = tuple(islice(value, most + 1))
    if len(items) > most:
        raise ValueError(f"{field}: more than {most} items")
    return items
