"""The file that an option names to be written: none that the command reads, and not where its report goes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from attncore.command import UsageError
from attncore.standard_output import is_standard_output

COMPRESSED = (".gz", ".svgz", ".bz2", ".xz", ".lzma", ".zst", ".lz4", ".br", ".z", ".zip")
"""Ends of names of files that are not plain text."""


def check_written_file(option: str, file: str | Path, others: Mapping[str, str | Path | None]) -> None:
    """UsageError, before anything is written, where ``file`` is standard output or one of ``others``, or where its name
    is that of a compressed file: plain text is written.

    ``others`` maps what each is, such as "the trace itself", to its path; ``-`` is standard input, None no file. Two
    names of one file are the same where links lead from one to the other. A hard link is another file: what is
    written takes the place of a name.
    """
    if str(file) == "-":
        raise UsageError(f"{option}: '-' is not written to; the report goes to standard output, so give a file")
    if (end := os.path.splitext(file)[1]).lower() in COMPRESSED:
        raise UsageError(
            f"{option}: {file} is the name of a compressed file, and what is written is plain text; leave out {end}"
        )
    if is_standard_output(file):
        raise UsageError(f"{option}: {file} is standard output, which the report is written to; give another file")
    for what, other in others.items():
        if other is not None and (_is_standard_input(file) if str(other) == "-" else _same(option, file, other)):
            raise UsageError(f"{option}: {file} is {what}; give another")


def _same(option: str, file: str | Path, other: str | Path) -> bool:
    try:
        return os.path.realpath(file) == os.path.realpath(other)  # Path.resolve raises for a link that leads to itself
    except OSError as error:  # a relative one, of a folder that has been deleted
        raise UsageError(f"{option}: {file} cannot be found: {error.strerror}, the current folder") from error


def _is_standard_input(path: str | Path) -> bool:
    """Whether standard input is read from the file ``path``."""
    try:
        ours, other = os.fstat(sys.stdin.fileno()), os.stat(path)
    except (OSError, ValueError, AttributeError):  # no file behind it, none of that name, or no standard input
        return False
    return stat.S_ISREG(other.st_mode) and os.path.samestat(ours, other)
