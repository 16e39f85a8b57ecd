"""Reading one JSON record per line: its fields by name and type. Errors begin with the field's path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from attncore.arguments import INT32_MAX
from attncore.input_files import duplicate, loaded_json, refuse, utf8
from attncore.quoted import MOST, quoted_json

REQUIRED = object()
"""In a mapping of known fields to defaults, the mark of a field that must be given."""


def read_record(line: str | bytes) -> tuple[str, Any]:
    """The line as text, and parsed; ValueError that begins with ``batch``."""
    try:
        text = utf8(line) if isinstance(line, bytes) else line
        return text, loaded_json(text, "a JSON object is expected", parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"batch: {error}") from None


def refuse_duplicates(text: str) -> None:
    """ValueError that names a field which stands twice in an object."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (name := duplicate(pairs)) is not None:
            raise ValueError(f"{name[:MOST]}: stands twice in one object")
        return dict(pairs)

    json.loads(text, object_pairs_hook=once)


def fields_of(prefix: str, whole: str, record: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an object, with defaults. Errors put ``prefix`` before a field and name the object ``whole``."""
    if not isinstance(record, dict):
        raise TypeError(f"{whole}: {quoted_json(record)} is not an object")
    unknown = record.keys() - known.keys()
    if unknown:
        name = min(unknown)
        text = name if is_short_name(name) else quoted_json(name)
        raise ValueError(f"{prefix}{text}: unknown field; known: {', '.join(known)}")
    fields = {**known, **record}
    for name, value in fields.items():
        if value is REQUIRED:
            raise ValueError(f"{prefix}{name}: missing")
    return fields


def is_short_name(name: str) -> bool:
    """Whether a message has ``name`` as it is, without quotation marks."""
    return name.isidentifier() and len(name) <= 40


def list_of(path: str, value: Any) -> list[Any]:
    """``value``, where it is a list that is not empty."""
    if not isinstance(value, list):
        raise TypeError(f"{path}: {quoted_json(value)} is not a list")
    if not value:
        raise ValueError(f"{path}: empty; at least one is needed")
    return value


def integer(path: str, value: Any, least: int | None) -> int:
    """``value``, where it is an int32 from ``least`` on; any 64-bit integer where ``least`` is None."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{path}: {quoted_json(value)} is not an integer")
    if least is None and not -(2**63) <= value < 2**63:
        raise ValueError(f"{path}: {quoted_json(value)} does not fit 64 bits")
    if least is not None and not least <= value <= INT32_MAX:
        raise ValueError(f"{path}: {quoted_json(value)} is outside {least}..{INT32_MAX}")
    return value


def optional(path: str, value: Any) -> int | None:
    """``value``, where it is a positive int32 or null."""
    return None if value is None else integer(path, value, 1)


def boolean(path: str, value: Any) -> bool:
    """``value``, where it is true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{path}: {quoted_json(value)} is not true or false")
    return value


def _refuse_constant(name: str) -> NoReturn:
    refuse(f"is not JSON: {name} is no number")
