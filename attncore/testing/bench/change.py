"""How a run's rows differ from those of saved runs, and which of the differences are more than noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from attncore.testing.bench.saved_runs import Row, Run

COMPARED = 5
"""As many of the last saved runs say what is usual."""
ENOUGH = 3
"""With fewer saved runs nothing is called slower or faster: single runs drift."""
LEFT_OUT = 5
"""One pass in so many is left out on either side: other work on the machine spoils some."""
MARGIN = 1.03
"""How far beyond the usual passes a change is at least."""


@dataclass(frozen=True)
class Change:
    """One row beside the saved runs; ``verdict`` is ``first run``, ``too few runs``, ``same``, ``slower``, ``faster``,
    or ``too short`` of a run that is not compared.
    """

    verdict: str
    percent: float | None = None
    """How much longer the row takes than in the saved runs, by medians of its time in yardsticks."""
    low: float | None = None
    high: float | None = None
    """Between what the passes of the saved runs lie, percent of their median: what is usual."""
    trend: tuple[float, ...] = ()
    """The medians of the saved runs and of this one, in yardsticks, the oldest first."""


def change(row: Row, saved: Sequence[Run]) -> Change:
    """Compare a row with the same row of ``saved``, the oldest first.

    It is slower only where its passes took longer than those of the last COMPARED runs, by the clock and in yardsticks,
    but for the passes left out: the passes of a run say how much times vary by themselves. It has to be beyond them by
    as much as the yardstick itself has changed, for a load slows one piece of work more than another.
    """
    before = [old for run in saved for old in run.rows if (old.step, old.part) == (row.step, row.part)]
    if not before:
        return Change("first run")
    usual = before[-COMPARED:]
    clock, ratios = ([one for old in usual for one in getattr(old, name)] for name in ("median", "to_yardstick"))
    moved = _yardstick(row.median, row.to_yardstick) / _yardstick(clock, ratios)
    margin = max(MARGIN, moved, 1 / moved)
    verdicts = {_beyond(row.median, clock, margin), _beyond(row.to_yardstick, ratios, margin)}
    agreed = verdicts.pop() if len(verdicts) == 1 else "same"
    middle = statistics.median(ratios)
    low, high = _range(ratios)
    return Change(
        agreed if len(before) >= ENOUGH else "too few runs",
        percent=_percent(statistics.median(row.to_yardstick), middle),
        low=_percent(min(low, middle), middle),
        high=_percent(max(high, middle), middle),
        trend=tuple(statistics.median(one.to_yardstick) for one in (*before, row)),
    )


def _yardstick(clock: list[float], ratios: list[float]) -> float:
    """The median time of the yardstick."""
    return statistics.median(time / ratio for time, ratio in zip(clock, ratios, strict=True))


def _beyond(new: list[float], old: list[float], margin: float) -> str:
    (quickest, slowest), (low, high) = _range(new), _range(old)
    if quickest > high * margin:
        return "slower"
    return "faster" if slowest < low / margin else "same"


def _range(passes: list[float]) -> tuple[float, float]:
    """The quickest and the slowest pass without one in LEFT_OUT at either end."""
    out = len(passes) // LEFT_OUT
    return sorted(passes)[out], sorted(passes)[-1 - out]


def _percent(value: float, base: float) -> float:
    return (value / base - 1) * 100
