"""Metadata as JSON types, of a limited size: the answer to a line of a JSON Lines file.

A short line may ask for far more than it holds, such as 2**31 tokens of a prompt. So an answer's numbers are counted
before memory is taken for them, by ``check_numbers`` or by the builder, and its text before it is made, by ``as_json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from attncore.json_output import json_text
from attncore.show import counted

MAX_ANSWER = 1 << 26
"""Bytes of the longest answer, unless another limit is given."""
LEAST_OF_A_NUMBER = 3
"""Bytes that a number takes at least: a digit, a comma, a blank."""


def check_numbers(field: str, what: str, numbers: int, max_answer: int) -> None:
    """ValueError, which begins with ``field``, where an answer of ``numbers`` numbers is longer than ``max_answer``."""
    if numbers * LEAST_OF_A_NUMBER > max_answer:
        raise ValueError(
            f"{field}: an answer of {what} is too large: {counted(numbers, 'number')} do not fit "
            f"{counted(max_answer, 'byte')}; --max-answer "
            "allows more"
        )


def fields_of_metadata(metadata: object, names: Iterable[str]) -> dict[str, Any]:
    """Fields by name: ints, bools and arrays."""
    return {name: getattr(metadata, name) for name in names}


def as_json(fields: Mapping[str, Any], max_answer: int) -> dict[str, Any]:
    """Fields as JSON has them, arrays as lists; ValueError where their text is longer than ``max_answer`` bytes.

    The text is what ``json_text`` makes of it; mappings of fields by group are allowed.
    """
    if _most_bytes(fields) > max_answer and (length := _text_bytes(fields)) > max_answer:
        raise ValueError(f"answer: {counted(length, 'byte')} are longer than {max_answer}; --max-answer allows more")
    return _converted(fields)  # type: ignore[no-any-return]


def _converted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _converted(one) for name, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def _most_bytes(fields: Mapping[str, Any]) -> int:
    """No less than the length of the text, at the cost of a look at each field."""
    most = 0
    for name, value in fields.items():
        most += 12 * len(name) + 32  # a letter may be written as two of \u0000
        if isinstance(value, np.ndarray):
            most += 22 * (value.size + len(value))  # an int64 has 20 letters; and brackets for each row
        elif isinstance(value, Mapping):
            most += _most_bytes(value)
        elif isinstance(value, list):
            most += 22 * len(value)
    return most


def _text_bytes(value: Any) -> int:
    """The length of the text of a value."""
    if isinstance(value, Mapping):
        return sum(len(json_text(name)) + 4 + _text_bytes(one) for name, one in value.items())
    if not isinstance(value, np.ndarray):
        return len(json_text(value))
    separators = 2 * len(value) if value.ndim == 2 else 0  # a comma, a blank or brackets for each row, and each number
    if not value.size:
        return 2 * separators or 2
    longer = sum(int(np.count_nonzero(value >= 10**power)) for power in range(1, len(str(int(value.max())))))
    signs = int(np.count_nonzero(value < 0))  # of -1, the one number below 0
    return separators + value.size * LEAST_OF_A_NUMBER + longer + signs
