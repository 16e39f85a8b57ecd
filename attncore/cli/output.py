"""Printing a command's result: JSON, lines of text, or a table.

On a terminal all is wrapped to its width; to a pipe or a file a row is one line, for the tools that read lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from attncore.registry.printable import one_line

_NARROW = 30
"""Columns that a cell is not wrapped to fewer of: it stands below its row then."""

_of_json: list[TextIO] = []
"""Standard output, where ``only_json`` has taken it."""


@contextlib.contextmanager
def only_json() -> Iterator[None]:
    """What ``print_json`` prints is all that reaches standard output; the rest goes to standard error."""
    _of_json.append(sys.stdout)
    try:
        with stdout_to_stderr():
            yield
    finally:
        _of_json.pop()


def print_json(value: Any) -> None:
    """``value`` as indented JSON on standard output."""
    stream = _of_json[-1] if _of_json else sys.stdout
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:  # a letter that the terminal's encoding lacks, or half of a surrogate pair
        text = json.dumps(value, indent=2)
    print(text, file=stream)


def columns(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal that ``stream`` (standard output) is, or COLUMNS; None where it is no terminal."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    stated = os.environ.get("COLUMNS", "")
    found = int(stated) if stated.isdecimal() and len(stated) < 9 else 0
    if not found:
        with contextlib.suppress(OSError, ValueError):  # no file behind it
            found = os.get_terminal_size(stream.fileno()).columns
    return max(found or 80, _NARROW)


def wrapped(line: str, width: int | None, indent: int | None = None) -> str:
    """A line as lines of ``width``; those below the first have an ``indent``, or four columns more than the first.

    A word, such as a path that will be copied, is whole; but in a cell of a table (``indent``), whose column it keeps.
    """
    if width is None or len(line) <= width:
        return line
    below = " " * (len(line) - len(line.lstrip()) + 4 if indent is None else indent)
    return textwrap.fill(
        line, width, subsequent_indent=below, break_long_words=indent is not None, break_on_hyphens=False
    )


def print_lines(text: str, stream: TextIO | None = None) -> None:
    """Print the lines of ``text``, each wrapped on a terminal."""
    width = columns(stream)
    print("\n".join(wrapped(line, width) for line in text.split("\n")), file=stream or sys.stdout)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under ``headers``. What a terminal has no room for stands below each row, with its header before it."""
    texts = [[one_line(cell) for cell in row] for row in rows]
    width = columns()
    widths = [max(len(row[i]) for row in (headers, *texts)) for i in range(len(headers))]
    starts = [sum(widths[:i]) + 2 * i for i in range(len(headers))]
    if width is None or starts[-1] + min(widths[-1], _NARROW) <= width:
        beside = len(headers)
    else:
        beside = max(1, sum(start + wide <= width for start, wide in zip(starts, widths, strict=True)))
    for row in (headers, *texts):
        line = "  ".join(cell.ljust(wide) for cell, wide in zip(row[:beside], widths, strict=False)).rstrip()
        print(wrapped(line, width, starts[beside - 1]))
        for header, cell in zip(headers[beside:], row[beside:] if row is not headers else (), strict=False):
            if cell:
                print(wrapped(f"    {header.lower()}: {cell}", width, 6))


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects what plugins print while they load to standard error, so that the command's own output stays clean."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
