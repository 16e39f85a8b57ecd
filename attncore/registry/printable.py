"""Values of plugins as text that can be printed on one line, and as JSON types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def listed(values: Iterable[object]) -> str:
    """Values in a sentence: ``a, b, c``, or ``none`` where there are none."""
    return ", ".join(str(value) for value in values) or "none"


def one_line(value: object) -> str:
    """The text of any value on one line that can be printed and encoded; empty where the value has none.

    For values of plugins: their ``__str__`` may raise anything, and a text may hold control codes or half a surrogate
    pair.
    """
    try:
        text = " ".join(str(value).split())
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def describe_error(error: BaseException) -> str:
    """The type and the text of an exception, on one line."""
    return f"{one_line(type(error).__name__)}: {one_line(error) or 'without a message'}"


def json_value(value: object, depth: int = 8) -> Any:
    """``value`` as JSON types, down to ``depth`` levels; any other value as its text on one line."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth and isinstance(value, Mapping):
        return {one_line(key): json_value(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [json_value(item, depth - 1) for item in value]
    if isinstance(value, str):
        return one_line(value)
    return one_line(value) or type(value).__name__
