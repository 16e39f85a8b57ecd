"""Printing a command's result as a table; as JSON it is ``attncore.json_output`` that prints it.

On a terminal all is wrapped to its width; to a pipe or a file a row is one line, for the tools that read lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from attncore.terminal import columns, table_lines


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under ``headers``. What a terminal has no room for stands below each row, with its header before it."""
    for line in table_lines(headers, rows, columns()):
        print(line)
