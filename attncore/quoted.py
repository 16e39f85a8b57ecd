"""Values from outside as error messages quote them: short, on one line, without control codes.

A message that quotes a value of an input uses one of these, so that ten megabytes of input make no message of ten
megabytes, and a terminal is sent no escape sequence of somebody else's. The module imports nothing of attncore.
"""

from __future__ import annotations

import json
import reprlib
from itertools import islice
from typing import Any

MOST = 200
"""The most characters of a value that a message quotes."""


class _Short(reprlib.Repr):
    """``repr`` that reads no further into a value than it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, MOST, MOST, MOST
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxarray = 20
        self.maxdict = 10

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 1000:  # and Python refuses to print thousands of digits
            return f"an integer of {value.bit_length()} bits"
        return super().repr_int(value, level)

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            return _cut(repr(value), MOST)
        except KeyboardInterrupt:
            raise
        except BaseException:  # __repr__ is the caller's code
            return f"<{_type_name(value)}>"


_short = _Short()


def quoted(value: Any) -> str:
    """``repr(value)`` on one line, cut to MOST characters; the type's name where the value has none."""
    try:
        text = _short.repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a collection of the caller's, or one that is nested too deeply
        text = f"<{_type_name(value)}>"
    return _cut(text, MOST)


def _type_name(value: Any) -> str:
    return str(type.__dict__["__name__"].__get__(type(value)))  # whatever its metaclass says


def quoted_json(value: Any, most: int = 40) -> str:
    """A value of JSON as JSON has it, cut to ``most`` characters; no more of it is read than that."""
    return _cut(json.dumps(_beginning(value, [most])), most)


def _beginning(value: Any, left: list[int]) -> Any:
    """The first ``left[0]`` values in a value, each of which takes a character at least."""
    left[0] -= 1
    if isinstance(value, str):
        return value[:MOST]
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print thousands of digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list):
        return [_beginning(one, left) for one in value[:MOST] if left[0] > 0]
    if isinstance(value, dict):
        return {name[:MOST]: _beginning(one, left) for name, one in islice(value.items(), MOST) if left[0] > 0}
    return value


def printable(text: str, most: int = MOST) -> str:
    """Text of another program, without quotation marks: on one line, control codes escaped, cut to ``most``."""
    line = " ".join(text[: 8 * most].split())
    return _cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line), most)


def _cut(text: str, most: int) -> str:
    if not text.isprintable():
        text = printable(text, most + 1)
    return text if len(text) <= most else text[: most - 3] + "..."
