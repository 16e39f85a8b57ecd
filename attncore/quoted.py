"""Text from outside as it may be printed: short, on one line, without control codes.

What a message holds of an input, a file, a plugin or another program goes through one of these: ``quoted`` and
``quoted_json`` for a value that is shown as such, ``one_line`` for text and ``describe_error`` for an exception. So ten
megabytes of input make no message of ten megabytes, and a terminal is sent no escape sequence of somebody else's.

What is handed over may be an object of somebody else's, whose methods such as ``__str__`` and ``__repr__`` may raise
anything; what is returned holds no such code. The module imports nothing of attncore.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

MOST = 200
"""The most characters of a value that a message quotes."""

MAX_PART = 1000
"""The most of a text inside a sentence, such as an exception's, so that the sentence is seldom cut again."""

MAX_TEXT = 4000
"""The most of a sentence of somebody else's, such as a plugin's reason."""

MAX_ITEMS = 1000
"""Items of a collection of a plugin beyond which it is cut, or refused."""

_WIDEST = 10
"""Characters that one is escaped to at most, as ``\\U000e0001``."""


class _Short(reprlib.Repr):
    """``repr`` that reads no further into a value than it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, MOST, MOST, MOST
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxarray = 20
        self.maxdict = 10

    def repr_int(self, value: int, level: int) -> str:
        return _bits(value) or super().repr_int(value, level)

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            return _many_dimensions(value) or _cut(repr(value), MOST)
        except KeyboardInterrupt:
            raise
        except BaseException:  # __repr__ is the caller's code
            return f"<{type_name(value)}>"


_short = _Short()


def _many_dimensions(value: Any) -> str:
    """What stands for an array or a tensor of more than 4 dimensions, whose libraries print up to six numbers of each:
    few bytes can have thousands of millions of numbers, a stride of 0 in each dimension. Empty for anything else.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    try:
        if numpy is not None and isinstance(value, numpy.ndarray):
            shape = numpy.ndarray.shape.__get__(value)
        elif torch is not None and isinstance(value, torch.Tensor):
            shape = torch.Tensor.shape.__get__(value)
        else:
            return ""
    except Exception:  # a nested tensor, which has none; a library that is imported by halves
        return ""
    return f"<{type_name(value)} of shape {tuple(shape)}>" if len(shape) > 4 else ""


def quoted(value: Any) -> str:
    """``repr(value)`` on one line, cut to MOST characters; the type's name where the value has none."""
    try:
        text = _short.repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a collection of the caller's, or one that is nested too deeply
        text = f"<{type_name(value)}>"
    return _cut(text, MOST)


def quoted_json(value: Any, most: int = 40) -> str:
    """A value of JSON as JSON has it, cut to ``most`` characters; no more of it is read than that."""
    import json  # here: most that quote a value read no JSON

    return _cut(json.dumps(_beginning(value, [most])), most)


def _beginning(value: Any, left: list[int]) -> Any:
    """The first ``left[0]`` values in a value, each of which takes a character at least."""
    left[0] -= 1
    if isinstance(value, str):
        return value[:MOST]
    if isinstance(value, int):
        return _bits(value) or value
    if isinstance(value, list):
        return [_beginning(one, left) for one in value[:MOST] if left[0] > 0]
    if isinstance(value, dict):
        return {name[:MOST]: _beginning(one, left) for name, one in islice(value.items(), MOST) if left[0] > 0}
    return value


def _bits(value: int) -> str:
    """What stands for an integer of hundreds of digits, of which Python prints thousands slowly or not at all."""
    return f"an integer of {value.bit_length()} bits" if value.bit_length() > 1000 else ""


def one_line(value: object, most: int = MAX_TEXT) -> str:
    """The text of any value on one line of at most ``most`` characters; empty where the value has none.

    Control codes, marks that turn the direction of writing and halves of surrogate pairs are escaped.
    """
    try:
        text = plain_text(str(value)) or ""
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""
    return _fitted(text, most, f" ... ({len(text)} letters)")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most and text.isprintable() else _fitted(text, most, "...")


def _fitted(text: str, most: int, end: str) -> str:
    """``text`` on one line, escaped; beyond ``most`` characters the rest is left out, and ``end`` stands there."""
    line = " ".join(text[: most * _WIDEST].split())[: most + 1]
    if not line.isprintable():  # asked of the whole first: nearly every text is
        line = "".join(letter if letter.isprintable() else _escaped(letter) for letter in line)
    if len(line) <= most and len(text) <= most * _WIDEST:
        return line
    return line[: most - len(end)] + end


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def printable(text: str) -> str:
    """Text of several lines with everything escaped that is no letter, blank or end of a line."""
    return "".join(letter if letter.isprintable() or letter == "\n" else _escaped(letter) for letter in text)


def plain_text(value: object) -> str | None:
    """``value`` as a str that is of no subclass; None where it is no string."""
    return str.__str__(value) if issubclass(type(value), str) else None


def type_name(value: object) -> str:
    """The name of a value's type, whatever its metaclass says."""
    return one_line(type.__dict__["__name__"].__get__(type(value)), MOST)


def describe_error(error: BaseException) -> str:
    """The type and the text of an exception, on one line."""
    return f"{type_name(error)}: {one_line(error, MAX_PART) or 'without a message'}"


def add_note(error: BaseException, text: str) -> None:
    """As the method does; nothing is added where a class of others makes that fail."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def notes(error: BaseException) -> list[str]:
    """What was added by ``add_note``; nothing where a class of others has something else in its place."""
    found: Any = None
    with contextlib.suppress(Exception):
        found = vars(error).get("__notes__")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def listed(values: Iterable[object]) -> str:
    """Values in a sentence: ``a, b, c``, or ``none`` where there are none."""
    return ", ".join(str(value) for value in values) or "none"


def json_value(value: object) -> Any:
    """``value`` as JSON types, down to 8 levels and MAX_ITEMS items in all; any other value as its text.

    What a collection of a plugin raises while it is read is raised.
    """
    return _json_value(value, 8, [MAX_ITEMS])


def _json_value(value: object, depth: int, left: list[int]) -> Any:
    """``left`` has the number of items that may be read yet."""
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
        return {one_line(key): _json_value(value[key], depth - 1, left) for key in _items(value, left)}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_json_value(item, depth - 1, left) for item in _items(value, left)]
    return one_line(value) or type_name(value)


def _items(values: Iterable[Any], left: list[int]) -> Iterator[Any]:
    for value in islice(values, left[0]):
        if left[0] <= 0:
            return
        left[0] -= 1
        yield value
