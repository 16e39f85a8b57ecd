"""Printing a command's result: JSON, lines, or a table (by rich on a terminal, in plain columns elsewhere)."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from attncore.quoted import one_line, printable
from attncore.standard_output import lent_streams

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
    if printable(text) != text:  # a control code that JSON allows
        text = json.dumps(value, indent=2)
    print(text, file=stream)


def print_text(text: str, file: TextIO | None = None) -> None:
    """Lines for people, on standard output or to ``file``; control codes of somebody else's text are escaped."""
    print(printable(text), file=file)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under ``headers``; the last column may be long: it wraps on a terminal and stays on one line elsewhere."""
    texts = [[one_line(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(headers, texts)
        return
    widths = [max(len(row[i]) for row in (list(headers), *texts)) for i in range(len(headers))]
    for row in (list(headers), *texts):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects what plugins print while they load to standard error, so that the command's own output stays clean.

    Both streams are lent: they are as before afterwards, whatever a plugin does to them.
    """
    with lent_streams(), contextlib.redirect_stdout(sys.stderr):
        yield


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, header in enumerate(headers):
        table.add_column(header, no_wrap=i < len(headers) - 1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
