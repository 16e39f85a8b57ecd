"""How a check ends other than well."""

from __future__ import annotations

from attncore.errors import AttncoreError


class ConformanceError(AssertionError):
    """The backend does not do what the contract says; the text says what, where, and what to look at."""


class UnsupportedError(AttncoreError):
    """The backend says, or its spec does, that it cannot do this here; shown as unsupported, with the reason."""
