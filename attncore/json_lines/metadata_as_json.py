"""Metadata as JSON types, of a limited size: the answer to a line of a JSON Lines file."""

from __future__ import annotations

from typing import Any

MAX_NUMBERS = 1 << 26
"""The most numbers in an answer. A short line may ask for far more than it holds, such as 2**31 tokens of a prompt."""


def json_value(metadata: object, name: str) -> Any:
    """A field of metadata as JSON has it: an int, a bool, or a list of an array's numbers."""
    value = getattr(metadata, name)
    return value if isinstance(value, (int, bool)) else value.tolist()
