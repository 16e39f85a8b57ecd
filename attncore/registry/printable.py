"""Values of plugins as text that can be printed on one line, as plain strings, and as JSON types.

What a plugin hands over may be an object of its own: methods such as ``__str__`` may raise anything. These functions
are given such objects, and return values that hold no code of a plugin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MAX_TEXT = 4000
"""Letters of a text beyond which it is cut."""

MAX_PART = 1000
"""The same for a value inside a sentence, so that the sentence is seldom cut again."""

MAX_ITEMS = 1000
"""Items of a collection of a plugin beyond which it is cut, or refused."""


def listed(values: Iterable[object]) -> str:
    """Values in a sentence: ``a, b, c``, or ``none`` where there are none."""
    return ", ".join(str(value) for value in values) or "none"


def plain_text(value: object) -> str | None:
    """``value`` as a str that is of no subclass; None where it is no string."""
    return str.__str__(value) if issubclass(type(value), str) else None


def one_line(value: object, most: int = MAX_TEXT) -> str:
    """The text of any value on one line that can be printed and encoded; empty where the value has none.

    A text may hold control codes, half a surrogate pair, or more than ``most`` letters, of which the rest is left out.
    """
    try:
        text = plain_text(str(value)) or ""
        cut = f" ... ({len(text)} letters)" if len(text) > most else ""
        words = " ".join(text[:most].split())
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in words) + cut


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def shown(value: object) -> str:
    """The repr of any value on one line; its type's name where it has none."""
    try:
        return one_line(repr(value), MAX_PART)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"a {type_name(value)}"


def type_name(value: object) -> str:
    """The name of a value's type, whatever its metaclass says."""
    return one_line(type.__dict__["__name__"].__get__(type(value)))


def describe_error(error: BaseException) -> str:
    """The type and the text of an exception, on one line."""
    return f"{type_name(error)}: {one_line(error, MAX_PART) or 'without a message'}"


def json_value(value: object, depth: int = 8) -> Any:
    """``value`` as JSON types, down to ``depth`` levels and MAX_ITEMS items of each; any other value as its text.

    What a collection of a plugin raises while it is read is raised.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if issubclass(kind, int) and int.bit_length(value) <= 64:  # type: ignore[arg-type]  # more digits may not print
        return int.__int__(value)  # type: ignore[arg-type]
    if issubclass(kind, float) and math.isfinite(value):  # type: ignore[arg-type]
        return float.__float__(value)  # type: ignore[arg-type]
    if issubclass(kind, str):
        return one_line(plain_text(value))
    if depth and isinstance(value, Mapping):
        return {one_line(key): json_value(value[key], depth - 1) for key in islice(value, MAX_ITEMS)}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [json_value(item, depth - 1) for item in islice(value, MAX_ITEMS)]
    return one_line(value) or type_name(value)
