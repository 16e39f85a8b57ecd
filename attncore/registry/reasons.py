"""A reason: why a backend cannot be used, with both values, who says so, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from attncore.registry.vocabulary import REASON_CODES

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

    def __str__(self) -> str:
        """The message, then what to do (beyond using another backend)."""
        return f"{self.message}; {self.fix}" if self.fix not in ("", OTHER) else self.message

    def as_json(self) -> dict[str, Any]:
        """The fields as a dictionary of JSON types."""
        return asdict(self)


def listed(values: Iterable[object]) -> str:
    """Values in a sentence: ``a, b, c``, or ``none``."""
    return ", ".join(str(value) for value in values) or "none"
