"""What a test of the kit stands for in the support table, and how it looks for a counterexample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Test = TypeVar("Test", bound=Callable[..., Any])


def covers(capability: str, *, gpu: bool = False) -> Callable[[Test], Test]:
    """Names the row of the support table that a test belongs to; ``{parameter}`` is filled in from its parameters.

    ``gpu`` gives the test the marker ``gpu``; it is skipped where the backend runs on a CPU.
    """

    def mark(test: Test) -> Test:
        test.__dict__["attncore_capability"] = capability
        test.__dict__["attncore_gpu"] = gpu
        return test

    return mark


def explore(check: Callable[..., None], examples: int, **strategies: st.SearchStrategy[Any]) -> None:
    """Call ``check`` with drawn arguments until it fails or ``examples`` are through. The same each time."""
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(given(**strategies)(check))()


def lengths(block_size: int, blocks: int = 3) -> st.SearchStrategy[int]:
    """Numbers of tokens from 1 up to ``blocks`` blocks, those around a block's edge more often."""
    edges = sorted({max(1, k * block_size + d) for k in range(blocks) for d in (-1, 0, 1)} - {0})
    return st.sampled_from(edges) | st.integers(1, blocks * block_size)


def rows(
    block_size: int, *, contexts: bool | None = None, decode: bool | None = None, most: int = 6
) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Lists of (context, tokens of the step). ``contexts`` True: all have one; False: none has; ``decode`` True: one
    token each; False: two or more where the context is not empty."""
    size = lengths(block_size)
    context = {True: size, False: st.just(0), None: st.just(0) | size}[contexts]
    tokens = {True: st.just(1), False: st.integers(2, 2 * block_size + 1), None: st.just(1) | size}[decode]
    return st.lists(st.tuples(context, tokens), min_size=1, max_size=most)
