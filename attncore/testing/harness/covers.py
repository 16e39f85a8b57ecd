"""The decorator that gives a test of the kit its row in the support table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])


def covers(capability: str, *, gpu: bool = False) -> Callable[[Test], Test]:
    """Name the row of the support table that a test belongs to; ``{parameter}`` is filled in from its parameters.

    ``gpu`` gives the test the marker ``gpu``; it is skipped where the backend runs on a CPU.
    """

    def mark(test: Test) -> Test:
        test.__dict__["attncore_capability"] = capability
        test.__dict__["attncore_gpu"] = gpu
        return test

    return mark
