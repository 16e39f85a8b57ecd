"""Reading what arrives from outside: never more of it than was said, whatever the file turns out to be.

``read_file`` for a file that is read whole, ``bounded_lines`` for a stream of lines (``standard_input``: of that, also
where it does not wait by itself), ``parse_json`` for text that is data alone, ``loaded_json`` for a line whose fields
are checked elsewhere. Errors are ValueErrors (OSErrors of the system aside) whose text says what is wrong; who calls
puts before it what was read.
"""

from __future__ import annotations

import io
import json
import os
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

from attncore.broken_json import BLANKS, mistake, not_utf8
from attncore.quoted import quoted_json
from attncore.show import counted

GZIP = b"\x1f\x8b"
"""What a gzipped file begins with."""


class Readable(Protocol):
    """A binary stream."""

    def readline(self, size: int, /) -> bytes:
        """The next line, or its first ``size`` bytes."""


class WaitingReader(io.RawIOBase):
    """A file descriptor whose reads do not wait, such as a pipe that the parent's event loop shares, read as one that
    does: else a pause would be taken for the end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes, as soon as there are any; their number, 0 at the end."""
        while True:
            try:
                return os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                select.select([self._descriptor], [], [])


def standard_input() -> Any:
    """Standard input as a binary stream that waits, whatever it is; who takes it leaves it open."""
    stream = sys.stdin.buffer
    try:
        descriptor = stream.fileno()
        waits = os.get_blocking(descriptor)
    except (OSError, ValueError):  # no file behind it
        return stream
    return stream if waits else io.BufferedReader(WaitingReader(descriptor))


def read_file(path: str | Path, most: int) -> bytes:
    """A regular file of at most ``most`` bytes; ValueError for a larger one, and for a pipe, a device or a folder.

    Opening never waits, as it would for a named pipe without a writer. Links are followed.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        data = file.read(most + 1)  # and not by its size, which a file of /proc has not, and which may grow
    if len(data) > most:
        raise ValueError(f"is larger than {counted(most, 'byte')}")
    return data


def bounded_lines(stream: Readable, most: int) -> Iterator[bytes]:
    """The lines of a stream with their line ends; ValueError for one of more than ``most`` bytes, which is not read."""
    while line := stream.readline(most + 1):
        if len(line) > most:
            raise ValueError(f"longer than {counted(most, 'byte')}")
        yield line


def parse_json(data: bytes, depth: int, empty: str) -> Any:
    """A JSON value of at most ``depth`` levels; ValueError for what is not JSON, for NaN, and for a field given twice.

    ``Infinity`` is read as it is: configurations of models have it. ``empty`` says what to do where nothing is there.
    """
    value = loaded_json(
        utf8(data), empty, parse_constant=_constant, parse_float=_finite, object_pairs_hook=_without_duplicates
    )
    if _is_deeper(value, depth):
        raise ValueError(f"is nested too deeply to be read: more than {depth} levels")
    return value


def utf8(data: bytes) -> str:
    """The text of bytes; ValueError in words of attncore."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None


def loaded_json(text: str, empty: str, **hooks: Any) -> Any:
    """``json.loads`` with ``hooks``; ValueError in words of attncore, and as ``refuse`` raises it in a hook."""
    text = text.rstrip(BLANKS)  # what is wrong behind its last character is that it ends there
    if not text:
        raise ValueError(f"is empty; {empty}")
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(mistake(error)) from None
    except RecursionError:
        raise ValueError("is nested too deeply to be read") from None
    except _RefusedError:
        raise
    except ValueError:  # Python's text speaks of its interpreter, which no file is to change
        raise ValueError(f"holds an integer of more than {sys.get_int_max_str_digits()} digits") from None


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        if not (level := [one for one in level if isinstance(one, list | dict)]):
            return False
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return True


def _constant(name: str) -> float:
    if name == "NaN":
        refuse("is not JSON: NaN is no number")
    return float(name)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        refuse(f"holds a number that is too large: {text[:20]}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (name := duplicate(pairs)) is not None:
        refuse(f"has the field {quoted_json(name)} twice in one object")
    return dict(pairs)


def duplicate(pairs: list[tuple[str, Any]]) -> str | None:
    """The first name that stands twice; None where each stands once."""
    if len(dict(pairs)) == len(pairs):
        return None
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return None


class _RefusedError(ValueError):
    """What is refused here, and not by ``json``."""


def refuse(text: str) -> NoReturn:
    """In a hook of ``loaded_json``: its ValueError."""
    raise _RefusedError(text)
