"""Draws lengths and batches with Hypothesis, and looks for an example that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from attncore.testing.harness.errors import ConformanceError, text_of


def explore(check: Callable[..., None], examples: int, **strategies: st.SearchStrategy[Any]) -> None:
    """Call ``check`` with drawn arguments until it fails or ``examples`` are through.

    The same arguments are drawn each time. ConformanceError where what failed is right when it is run again.
    """
    run = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[phase for phase in settings().phases if phase is not Phase.explain],
        suppress_health_check=list(HealthCheck),
    )(given(**strategies)(check))
    try:
        run()
    except Flaky as error:
        first = next(iter(getattr(error, "exceptions", ())), error)
        raise ConformanceError(
            f"{text_of(first)}; run again, the same steps were right: something of an earlier step was kept, such as a "
            "plan by the id() of metadata that was gone"
        ) from None


def lengths(block_size: int, blocks: int = 3) -> st.SearchStrategy[int]:
    """Numbers of tokens from 1 up to ``blocks`` blocks, those around a block's edge more often."""
    edges = sorted({max(1, k * block_size + d) for k in range(blocks) for d in (-1, 0, 1)} - {0})
    return st.sampled_from(edges) | st.integers(1, blocks * block_size)


def batches(
    block_size: int, *, contexts: bool | None = None, decode: bool | None = None, most: int = 6
) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Lists of requests as (context, tokens of the step).

    ``contexts`` True: every request has a context; False: none has. ``decode`` True: one token each; False: two tokens
    or more.
    """
    length = lengths(block_size)
    context = {True: length, False: st.just(0), None: st.just(0) | length}[contexts]
    tokens = {True: st.just(1), False: st.integers(2, 2 * block_size + 1), None: st.just(1) | length}[decode]
    return st.lists(st.tuples(context, tokens), min_size=1, max_size=most)
