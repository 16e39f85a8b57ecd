"""The decorator that gives a test of the kit its row in the support table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])


def covers(capability: str, *, gpu: bool = False, basis: bool = False, apart: bool = False) -> Callable[[Test], Test]:
    """Name the row of the support table that a test belongs to; ``{parameter}`` is filled in from its parameters.

    ``gpu`` gives the test the marker ``gpu``; it is skipped where the backend runs on a CPU. Tests that are a ``basis``
    run first in their file; once one has failed, the others there are not run but those ``apart``, which tell something
    of their own.
    """

    def mark(test: Test) -> Test:
        test.__dict__["attncore_capability"] = capability
        test.__dict__["attncore_gpu"] = gpu
        test.__dict__["attncore_basis"] = basis
        test.__dict__["attncore_apart"] = apart
        return test

    return mark
