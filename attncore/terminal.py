"""Lines for people: wrapped to the width of a terminal, whole in a pipe or a file, and without control codes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from attncore.quoted import one_line, printable

_COMMAND = re.compile(r"pip install(?: (?:'[^']*'|[^\s',;()]+))+")
"""A command as ``how_to_install`` writes it: behind it stand a comma, a semicolon, a parenthesis, or nothing."""

NARROW = 30
"""Columns that nothing is wrapped to fewer of."""


def columns(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal that ``stream`` (standard output) is, or COLUMNS; None where it is no terminal."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    found = _stated()
    if not found:
        with contextlib.suppress(OSError, ValueError):  # no file behind it
            found = os.get_terminal_size(stream.fileno()).columns
    return max(found or 80, NARROW)


def columns_of_help() -> int:
    """The columns that help is written to, which is wrapped in a pipe too: the terminal's, or COLUMNS, or 80."""
    return columns() or max(_stated() or 80, NARROW)


def _stated() -> int:
    """COLUMNS; 0 where it states no number."""
    stated = os.environ.get("COLUMNS", "")
    return int(stated) if stated.isdecimal() and len(stated) < 9 else 0


def wrapped(line: str, width: int | None, indent: int | None = None) -> str:
    """A line as lines of ``width``; those below the first have an ``indent``, or four columns more than the first.

    A word, such as a path that will be copied, is whole; but in a cell of a table (``indent``), whose column it keeps.
    A command that installs something is whole too, on a line of its own where there is no room for it beside others,
    and wider than ``width`` where it must be: the terminal breaks it then, and what is copied is in one piece.
    """
    if width is None or len(line) <= width:
        return line
    below = " " * (len(line) - len(line.lstrip()) + 4 if indent is None else indent)
    text = _filled(line, width, below, indent)
    command = _COMMAND.search(line)
    if command is None or any(command[0] in one for one in text.split("\n")):
        return text
    parts = [_filled(line[: command.start()].rstrip(), width, below, indent), below + command[0]]
    if rest := line[command.end() :].lstrip(",; "):
        parts.append(wrapped(below + rest, width, len(below)))
    return "\n".join(parts)


def _filled(line: str, width: int, below: str, indent: int | None) -> str:
    if indent is None:
        return textwrap.fill(line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)
    # The cell alone is wrapped: a word that is wider than its column begins beside the others, not below them.
    cell = textwrap.wrap(line[indent:], max(1, width - indent), break_on_hyphens=False)
    return line[:indent] + f"\n{below}".join(cell)


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[object]], width: int | None) -> Iterator[str]:
    """The lines of a table of ``width`` columns (None: as wide as it is). What there is no room for stands below each
    row, with its header before it.
    """
    texts = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (headers, *texts)) for i in range(len(headers))]
    starts = [sum(widths[:i]) + 2 * i for i in range(len(headers))]
    if width is None or starts[-1] + min(widths[-1], NARROW) <= width:
        beside = len(headers)
    else:
        beside = max(1, sum(start + wide <= width for start, wide in zip(starts, widths, strict=True)))
    for row in (headers, *texts):
        line = "  ".join(cell.ljust(wide) for cell, wide in zip(row[:beside], widths, strict=False)).rstrip()
        yield from wrapped(line, width, starts[beside - 1]).split("\n")
        for header, cell in zip(headers[beside:], row[beside:] if row is not headers else (), strict=False):
            if cell:
                yield from wrapped(f"    {header.lower()}: {cell}", width, 6).split("\n")


def print_lines(text: str, stream: TextIO | None = None) -> None:
    """Print the lines of ``text``, each wrapped on a terminal; control codes of somebody else's text are escaped."""
    width = columns(stream)
    print("\n".join(wrapped(line, width) for line in printable(text).split("\n")), file=stream or sys.stdout)
