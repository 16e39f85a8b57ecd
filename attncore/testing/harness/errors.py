"""The errors that end a check: not conforming, not supported; and other errors in words."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attncore
from attncore.errors import AttncoreError
from attncore.quoted import MAX_TEXT, plain_text, type_name
from attncore.show import counted

_OWN_FOLDER = Path(attncore.__file__).parent
_LIBRARIES = {"torch", "_pytest", "pluggy", "hypothesis"}
"""Packages whose frames lie between a check and the backend, or beneath it."""


class ConformanceError(AssertionError):
    """The backend does not do what the contract says; the text says what, where, and what to look at.

    ``max_error`` is the largest error of an output that is wrong; None where something else is.
    """

    def __init__(self, text: str, max_error: float | None = None) -> None:
        super().__init__(text)
        self.max_error = max_error


class UnsupportedError(AttncoreError):
    """The backend says, or its spec does, that it cannot do this here; shown as unsupported, with the reason."""


class RefusedStepError(UnsupportedError):
    """The backend refuses a step of the list builder, as it may: by a ValueError that begins with ``metadata``."""


class NotRunError(UnsupportedError):
    """Something that the check builds on is wrong, and a test of its own says so; shown as not run."""


class NothingToRefuseError(UnsupportedError):
    """The backend declares what would be refused; there is nothing to check, and no row for it."""


@contextmanager
def may_be_refused() -> Iterator[None]:
    """RefusedStepError where the backend refuses the step of the list builder that is run."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("metadata"):
            raise
        raise RefusedStepError(str(error)) from error


def text_of(error: BaseException) -> str:
    """An error's text, cut to MAX_TEXT; empty where it has none, or where its ``__str__``, which is the backend's code,
    raises.
    """
    try:
        text = plain_text(str(error)) or ""
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({counted(len(text), 'letter')})"


def told(error: BaseException) -> str:
    """An error in words: its type and text, that it has none, and where in the backend's own code it was raised."""
    text = text_of(error)
    words = f"{type_name(error)}: {text}" if text else f"{type_name(error)} without a message"
    if isinstance(error, ConformanceError):
        return words
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    for file, line in reversed(frames):
        if not file.is_relative_to(_OWN_FOLDER) and _LIBRARIES.isdisjoint(file.parts):
            return f"{words} ({file.name}:{line})"
    return words
