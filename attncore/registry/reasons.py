"""A reason: why a backend cannot be used, with both values, who says so, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attncore.vocabulary import REASON_CODES

OTHER = "use another backend"
"""The fix where nothing about this backend can be changed; texts leave it out."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason of one candidate.

    ``code`` is of the closed vocabulary REASON_CODES; ``message`` a sentence that holds both values; ``asked`` and
    ``accepted`` the same values as JSON types; ``source`` who says so (a distribution with its version, or attncore);
    ``fix`` what to do.
    """

    code: str
    message: str
    asked: Any = None
    accepted: Any = None
    source: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.code not in REASON_CODES:
            raise ValueError(f"code: {self.code!r} is not one of {', '.join(REASON_CODES)}")
        for name in ("message", "source", "fix"):
            object.__setattr__(self, name, one_line(getattr(self, name)))

    def __str__(self) -> str:
        """The message, then what to do (beyond using another backend)."""
        return f"{self.message}; {self.fix}" if self.fix not in ("", OTHER) else self.message

    def as_json(self) -> dict[str, Any]:
        """The fields as a dictionary of JSON types."""
        return {
            "code": self.code,
            "message": self.message,
            "asked": _json(self.asked),
            "accepted": _json(self.accepted),
            "source": self.source,
            "fix": self.fix,
        }


def listed(values: Iterable[object]) -> str:
    """Values in a sentence: ``a, b, c``, or ``none``."""
    return ", ".join(str(value) for value in values) or "none"


def one_line(value: object) -> str:
    """The text of any value on one line that can be printed and encoded; empty where the value has none.

    What plugins hand over goes through here: a ``__str__`` may raise anything, a text may hold control codes or half
    a surrogate pair.
    """
    try:
        text = " ".join(str(value).split())
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _json(value: object, depth: int = 8) -> Any:
    """``value`` as JSON types; the text of what is none of them, and of what lies too deep."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth and isinstance(value, Mapping):
        return {one_line(key): _json(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_json(item, depth - 1) for item in value]
    if isinstance(value, str):
        return one_line(value)
    return one_line(value) or type(value).__name__
