"""How a run's rows differ from those of saved runs, and which of the differences are more than noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attncore.testing.bench.saved_runs import Row, Run

COMPARED = 5
"""As many of the last saved runs say what is usual."""


@dataclass(frozen=True)
class Change:
    """One row beside the saved runs. ``verdict`` is ``first run``, ``same``, ``slower`` or ``faster``."""

    verdict: str
    percent: float | None = None
    """How much longer the row takes than in the saved runs, by medians of its time in yardsticks."""
    low: float | None = None
    high: float | None = None
    """How far single passes of the saved runs lie from their median, percent: what is usual."""
    trend: tuple[float, ...] = ()
    """The medians of the saved runs and of this one, in yardsticks, the oldest first."""


def change(row: Row, saved: Sequence[Run]) -> Change:
    """Compare a row with the same row of ``saved``, the oldest first.

    It is slower only where each of its passes took longer than every pass of the last COMPARED runs, by the clock and
    in yardsticks: the passes of a run are what says how much times vary by themselves.
    """
    before = [old for run in saved for old in run.rows if (old.step, old.part) == (row.step, row.part)]
    if not before:
        return Change("first run")
    usual = before[-COMPARED:]
    verdicts = {_beyond(getattr(row, name), [one for old in usual for one in getattr(old, name)]) for name in _FIGURES}
    passes = [one for old in usual for one in old.to_yardstick]
    middle = statistics.median(passes)
    return Change(
        verdicts.pop() if len(verdicts) == 1 else "same",
        percent=_percent(statistics.median(row.to_yardstick), middle),
        low=_percent(min(passes), middle),
        high=_percent(max(passes), middle),
        trend=tuple(statistics.median(one.to_yardstick) for one in (*before, row)),
    )


_FIGURES = ("median", "to_yardstick")


def _beyond(new: list[float], old: list[float]) -> str:
    if min(new) > max(old):
        return "slower"
    return "faster" if max(new) < min(old) else "same"


def _percent(value: float, base: float) -> float:
    return (value / base - 1) * 100
