"""A command that reads standard input says so on a terminal, which would otherwise wait in silence."""

from __future__ import annotations

import sys

from attncore.terminal import print_lines


def say_that_it_reads(command: str, what: str) -> None:
    """A line on standard error where standard input is a terminal: that ``command`` reads ``what``, and how it ends."""
    if sys.stdin.isatty():
        print_lines(f"attncore {command}: reading standard input, {what}; Ctrl-D ends it", sys.stderr)
