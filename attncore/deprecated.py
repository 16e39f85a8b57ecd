"""Names that go: each warns for two minor releases, and says what to use instead.

A row of DEPRECATED is all that is written for one: the release that first warned, and what replaces the name. The
release that it goes in follows from that. The old name calls ``warn_deprecated``, or wears ``deprecated``; a name of
``attncore`` itself that is another name now needs the row alone.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec, TypeVar

RELEASES = 2
"""Minor releases for which a name warns, the first included, before it goes."""

P = ParamSpec("P")
R = TypeVar("R")


class Deprecation(NamedTuple):
    """A name that goes: ``since`` is ``X.Y``, the release that first warned; ``instead`` is what to use."""

    since: str
    instead: str

    @property
    def removed_in(self) -> str:
        """The release without the name: ``0.5`` for one that warned first in 0.3."""
        major, minor = map(int, self.since.split("."))
        return f"{major}.{minor + RELEASES}"


DEPRECATED: dict[str, Deprecation] = {}
"""The names that go, as users write them: ``attncore.select``, ``InputBatch.free``, ``InputBatch.free(count)``."""


def warn_deprecated(name: str, stacklevel: int = 2) -> None:
    """Warn (DeprecationWarning) that ``name``, a row of DEPRECATED, goes.

    ``stacklevel`` is that of ``warnings.warn``, counted from the function that calls this one: 1 is that function's own
    line, 2 the line that called it. KeyError where there is no such row.
    """
    row = DEPRECATED[name]
    text = f"{name} is deprecated since attncore {row.since} and goes in {row.removed_in}; use {row.instead}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def deprecated(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: each call of the function or method warns as ``warn_deprecated(name)`` does."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def warns(*args: P.args, **kwargs: P.kwargs) -> R:
            warn_deprecated(name)
            return function(*args, **kwargs)

        return warns

    return wrap


def renamed(name: str) -> Any:
    """What ``attncore.<name>`` was renamed to, with the warning to the caller of ``attncore.__getattr__``.

    AttributeError where DEPRECATED has no such row, or its ``instead`` is no name of attncore.
    """
    row = DEPRECATED.get(f"attncore.{name}")
    if row is None or not row.instead.startswith("attncore."):
        raise AttributeError(name)
    warn_deprecated(f"attncore.{name}", stacklevel=3)
    return getattr(import_module("attncore"), row.instead.removeprefix("attncore."))
