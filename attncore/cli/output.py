"""Printing a command's result: JSON, or a table.

On a terminal all is wrapped to its width; to a pipe or a file a row is one line, for the tools that read lines.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from attncore.quoted import printable
from attncore.standard_output import lent_streams
from attncore.terminal import columns, table_lines

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


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under ``headers``. What a terminal has no room for stands below each row, with its header before it."""
    for line in table_lines(headers, rows, columns()):
        print(line)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects what plugins print while they load to standard error, so that the command's own output stays clean.

    Both streams are lent: they are as before afterwards, whatever a plugin does to them.
    """
    with lent_streams(), contextlib.redirect_stdout(sys.stderr):
        yield
