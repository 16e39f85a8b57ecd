"""What is wrong with a text that is no JSON, in words of attncore's own.

Those of ``json`` name its parser's state (``Expecting ',' delimiter``), differ between versions of Python, and call a
line that is cut inside a string one with a control character: the end of the line. The module imports nothing of
attncore but how values are quoted.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

from attncore.quoted import one_line, quoted

if TYPE_CHECKING:
    from json import JSONDecodeError

BLANKS = " \t\r\n"
"""What may stand around a value of JSON."""

_CONSTANTS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_NUMBER_WITHOUT_END = re.compile(r"\.|(?:\.[0-9]+)?[eE][+-]?")
"""What is left of a number that is cut: ``json`` takes the digits before it for a whole one."""
_ESCAPE_WITHOUT_END = re.compile(r"\\?u?[0-9a-fA-F]{0,4}")
_EXPECTED = {
    "Expecting value": "expected a value",
    "Expecting property name": "expected a name in double quotes",
    "Expecting ':'": "expected ':' after a name",
    "Expecting ','": "expected ',' or a closing bracket",
    "Extra data": "expected the end",
}
"""The beginning of what ``json`` says, in any version of Python, and what is said of it here."""


def mistake(error: JSONDecodeError) -> str:
    """What is wrong with ``error.doc``, which has no blanks behind it: ``ends in ...``, ``is not JSON: ...``."""
    text, start = error.doc, error.pos
    if text.startswith("\ufeff"):
        return "begins with a byte order mark: save it as UTF-8 without one"
    if error.msg.startswith("Unterminated string"):
        return f"{_ends(text)}, or a quotation mark is missing"
    if _is_cut(error):
        return _ends(text)
    reason, start = _reason(error)
    return f"is not JSON: {reason} at {_place(text, start)}"


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are no UTF-8."""
    start, rest = error.start, error.object[error.start :].rstrip(BLANKS.encode())
    try:
        # Nothing, and no error, of the first bytes of a character whose others are missing.
        cut = not codecs.getincrementaldecoder("utf-8")().decode(rest)
    except UnicodeDecodeError:
        cut = False
    if cut:
        return f"ends in the middle of a character, at byte {start + len(rest)}: it may be cut"
    return f"is not UTF-8: byte {start + 1} is {rest[0]:#04x}"


def _is_cut(error: JSONDecodeError) -> bool:
    """Whether the text is the beginning of JSON: nothing is wrong with it but that it ends."""
    rest = error.doc[error.pos :]
    if error.msg.startswith("Expecting ','"):
        return not rest or _NUMBER_WITHOUT_END.fullmatch(rest) is not None
    if error.msg.startswith("Expecting value"):
        return any(one.startswith(rest) for one in _CONSTANTS)
    return not rest or (error.msg.startswith("Invalid \\u") and _ESCAPE_WITHOUT_END.fullmatch(rest) is not None)


def _reason(error: JSONDecodeError) -> tuple[str, int]:
    """Why the text is none, and the position of that: both the same in each version of Python."""
    text, start = error.doc, error.pos
    found, before = text[start], text[:start].rstrip(BLANKS)
    if error.msg.startswith("Invalid control character"):
        return ("a line ends" if found in "\r\n" else f"{quoted(found)} stands") + " inside a string", start
    if error.msg.startswith("Invalid \\u"):
        return "expected four hexadecimal digits after \\u", start
    if error.msg.startswith("Invalid \\"):
        return f"unknown escape '{one_line(text[start : start + 2])}' in a string", start
    if found in "}]" and before.endswith(","):
        return f"a comma before the closing {found!r}", len(before) - 1
    if error.msg.startswith("Illegal trailing comma"):  # Python 3.13 and later, with the position of the comma
        return f"a comma before the closing {text[start + 1 :].lstrip(BLANKS)[:1]!r}", start
    for beginning, expected in _EXPECTED.items():
        if error.msg.startswith(beginning):
            return f"{expected}, found {quoted(found)}", start
    return f"unexpected {quoted(found)}", start


def _ends(text: str) -> str:
    return f"ends in the middle of a value, at {_place(text, len(text) - 1)}: it may be cut"


def _place(text: str, position: int) -> str:
    """The column of a position, counted from 1; the line too, where there are several."""
    column = f"column {position - text.rfind(chr(10), 0, position)}"
    return f"line {text.count(chr(10), 0, position) + 1}, {column}" if "\n" in text else column
