"""The Azure LLM inference trace: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

Lines end in CR LF or LF, the last one possibly in nothing (the published files do); timestamps read
``YYYY-MM-DD hh:mm:ss.fffffff`` in units of 100 ns. The traces say nothing about what prompts share.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from attncore.replay.traces.trace import Request, checked_length, checked_total

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(?:\+00:00)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def recognises(first_line: str) -> bool:
    """Whether a file that begins with this line is an Azure trace (its header is the first line)."""
    return tuple(first_line.split(",")) == COLUMNS


def rows(lines: Iterable[str]) -> Iterator[Request]:
    """The requests of the lines after the header; a ValueError that begins with the field's name ends the run."""
    first = previous = None
    for row, line in enumerate(lines, start=1):
        cells = line.split(",")
        if len(cells) != len(COLUMNS):
            raise ValueError(f"columns: {len(cells)} found in {line[:60]!r}, {', '.join(COLUMNS)} expected")
        nanoseconds = _nanoseconds(cells[0])
        if previous is not None and nanoseconds < previous:
            raise ValueError(f"{COLUMNS[0]}: {cells[0]} lies before the row above; rows must be in order of time")
        previous = nanoseconds
        first = nanoseconds if first is None else first
        prompt, output = (_tokens(name, cell) for name, cell in zip(COLUMNS[1:], cells[1:], strict=True))
        checked_total(COLUMNS[1], prompt, COLUMNS[2], output)
        yield Request(row, (nanoseconds - first) / 1e9, prompt, output)


def _nanoseconds(cell: str) -> int:
    """A timestamp as nanoseconds since 1970; exact, which a float of seconds would not be."""
    match = _TIMESTAMP.fullmatch(cell)
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    except ValueError:
        raise ValueError(f"{COLUMNS[0]}: {cell[:40]!r} is not a time YYYY-MM-DD hh:mm:ss.fffffff") from None
    elapsed = moment - _EPOCH
    return (elapsed.days * 86400 + elapsed.seconds) * 10**9 + int((match[2] or "0").ljust(9, "0"))


def _tokens(name: str, cell: str) -> int:
    digits = cell[1:] if cell[:1] == "-" else cell
    # Longer numbers are too large in any case, and int() refuses thousands of digits with a text of its own.
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 40:
        raise ValueError(f"{name}: {cell[:40]!r} is not a whole number of tokens")
    return checked_length(name, int(cell))
