"""Mistakes of a user, which the command line prints as one line."""

from __future__ import annotations


class UsageError(ValueError):
    """A mistake on the command line or in an input file; its text is the line that the user sees."""


class InputLineError(UsageError):
    """A mistake in one line of a stream: its text begins with ``line N:`` and is printed as it is."""
