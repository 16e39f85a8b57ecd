"""JSON that commands print and processes write: always JSON, and on standard output nothing beside it.

``json_text`` is what all JSON is made by: Python's own would write NaN and Infinity, which no other reader takes.
``only_json`` and ``print_json`` are what ``--json`` means to every command.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from attncore.quoted import printable
from attncore.standard_output import LentStreams, kept_stream, stdout_to_stderr

_of_json: list[TextIO] = []
"""Standard output, where ``only_json`` has taken it."""


def json_text(value: Any, **options: Any) -> str:
    """``value`` as JSON, in which a float that is no finite number is null; ``options`` are those of ``json.dumps``."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def only_json(wanted: bool, *, to_the_end: bool) -> Iterator[None]:
    """Where it is ``wanted``, what ``print_json`` prints is all that reaches standard output; the rest goes to standard
    error.

    With ``to_the_end`` that is so until the process ends: a thread of a plugin's may print when the command is done.
    """
    if not wanted:
        yield
        return
    _of_json.append(sys.stdout)
    if to_the_end:
        LentStreams().lend()
        sys.stdout = sys.stderr
        yield
        return
    try:
        with stdout_to_stderr():
            yield
    finally:
        _of_json.pop()


def print_json(value: Any) -> None:
    """``value`` as indented JSON on standard output."""
    stream = _of_json[-1] if _of_json else kept_stream("stdout")
    text = json_text(value, indent=2, ensure_ascii=False)
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:  # a letter that the terminal's encoding lacks, or half of a surrogate pair
        text = json_text(value, indent=2)
    if printable(text) != text:  # a control code that JSON allows
        text = json_text(value, indent=2)
    print(text, file=stream, flush=True)  # here, where a full disk is an error of the command
