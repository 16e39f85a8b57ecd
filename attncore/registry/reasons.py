"""Reason: why a backend cannot be used, with the value asked, the values accepted, who says so, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncore.quoted import json_value, one_line, quoted
from attncore.vocabulary import REASON_CODES

USE_ANOTHER = "use another backend"
"""The fix where the request cannot be changed to suit this backend; texts leave it out."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason against one candidate. ValueError where ``code`` is not of REASON_CODES.

    ``message`` is a sentence that holds the value asked and the values accepted; ``asked`` and ``accepted`` are these
    values; ``source`` says who states the reason (a distribution with its version, or attncore); ``fix`` what to do.
    """

    code: str
    message: str
    asked: Any = None
    accepted: Any = None
    source: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.code not in REASON_CODES:
            raise ValueError(f"code: {quoted(self.code)} is not one of {', '.join(REASON_CODES)}")
        for name in ("message", "source", "fix"):
            object.__setattr__(self, name, one_line(getattr(self, name)))

    def __hash__(self) -> int:  # ``asked`` and ``accepted`` may be lists
        return hash((self.code, self.message, self.source, self.fix))

    def __str__(self) -> str:
        """The message, then what to do (beyond using another backend)."""
        return f"{self.message}; {self.fix}" if self.fix not in ("", USE_ANOTHER) else self.message

    def as_json(self) -> dict[str, Any]:
        """The fields as a dictionary of JSON types."""
        return {
            "code": self.code,
            "message": self.message,
            "asked": json_value(self.asked),
            "accepted": json_value(self.accepted),
            "source": self.source,
            "fix": self.fix,
        }


class FailedCheck(Reason):
    """A spec's own check has failed: it says that, and nothing of the request."""

    __slots__ = ()
