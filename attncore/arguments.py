"""Checks of scalar arguments. Errors begin with the argument's name and say what was given and what is allowed.

The module imports next to nothing, so that light modules may use it. Checks of arrays are in ``array_arguments``.
"""

from __future__ import annotations

from typing import Any

from attncore.quoted import quoted

INT32_MAX = 2**31 - 1


def integer_or_none(value: Any) -> int | None:
    """``value`` as int where it is an integer of any library; None for a bool and for anything else."""
    if isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        return None
    try:
        return int(value.__index__())
    except Exception:  # __index__ may be the caller's code: whatever it raises, the value is not an integer
        return None


def integer(name: str, value: Any, least: int, most: int = INT32_MAX) -> int:
    """``value`` as int; TypeError where it is not an integer, ValueError outside ``least``..``most``."""
    number = integer_or_none(value)
    if number is None:
        raise TypeError(f"{name}: {quoted(value)} is not an integer")
    if number < least:
        raise ValueError(f"{name}: {quoted(number)} is below {least}")
    if number > most:
        raise ValueError(
            f"{name}: {quoted(number)} " + ("does not fit int32" if most == INT32_MAX else f"exceeds {most}")
        )
    return number


def positive_integer(name: str, value: Any) -> int:
    """Checks a value of a declaration or a file: ``value`` as int; ValueError where it is no integer, or below 1."""
    number = integer_or_none(value)
    if number is None or number < 1:
        raise ValueError(f"{name}: {quoted(value)} is not a positive integer")
    return number
