"""The Mooncake trace: JSON Lines with timestamp (ms), input_length, output_length and hash_ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.input_files import parse_json
from attncore.quoted import quoted_json
from attncore.replay.traces.trace import HASH_BLOCK, MAX_HASH_ID, Request, checked_length, checked_total

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_DEPTH = 8
"""Levels of a line; those of the fields that are read are two."""
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def recognises(first_line: str) -> bool:
    """Whether a file that begins with this line is a Mooncake trace: JSON Lines, an object a line."""
    return first_line.lstrip().startswith("{")


def rows(lines: Iterable[str]) -> Iterator[Request]:
    """The requests of all lines; a ValueError that begins with the field's name, or ``the line``, ends the run."""
    first = previous = None
    for row, line in enumerate(lines, start=1):
        record = _record(line)
        milliseconds = _milliseconds(record["timestamp"])
        if previous is not None and milliseconds < previous:
            raise ValueError(f"timestamp: {milliseconds} lies before the row above, {previous}; rows must be in order")
        previous = milliseconds
        first = milliseconds if first is None else first
        prompt, output = (_tokens(name, record[name]) for name in FIELDS[1:3])
        checked_total(FIELDS[1], prompt, FIELDS[2], output)
        yield Request(row, (milliseconds - first) / 1e3, prompt, output, _hash_ids(record["hash_ids"], prompt))


def _record(line: str) -> dict[str, Any]:
    try:
        record = parse_json(line.encode(), MAX_DEPTH, f"each line has {', '.join(FIELDS)}")
    except ValueError as error:
        raise ValueError(f"the line {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"the line is {quoted_json(record)}, not an object with {', '.join(FIELDS)}")
    for name in FIELDS:
        if name not in record:
            raise ValueError(f"{name}: missing; each line has {', '.join(FIELDS)}")
    return record


def _milliseconds(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:  # NaN neither
        raise ValueError(f"timestamp: {quoted_json(value)} is not a number of milliseconds from 0 to 2**53")
    return value


def _tokens(name: str, value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{name}: {quoted_json(value)} is not a whole number of tokens")
    return checked_length(name, value)


def _hash_ids(value: object, prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"hash_ids: {quoted_json(value)} is not a list of ids")
    expected = -(-prompt_tokens // HASH_BLOCK)
    if len(value) != expected:
        raise ValueError(
            f"hash_ids: {len(value)} found, input_length {prompt_tokens} needs {expected}, one for each "
            f"{HASH_BLOCK} tokens"
        )
    for index, identity in enumerate(value):
        if type(identity) is not int or not 0 <= identity <= MAX_HASH_ID:
            raise ValueError(f"hash_ids: [{index}] is {quoted_json(identity)}, not a whole number from 0 to 2**62 - 1")
    return tuple(value)
