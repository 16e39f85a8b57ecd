"""What the plots of a replay show: the batch over virtual time, and how many builds took how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from array import array

    from attncore.replay.results.measurements import Steps

NUM_BINS = 240
"""Of a timeline. It has many divisors, so that a narrow terminal shows as many bins as it has room for."""
_SUMMED_UP: dict[str, Callable[[Any], Any]] = {"requests": max, "prefill_tokens": sum, "decode_tokens": sum}
"""Of each line of a timeline, what several bins show as one."""


def timeline(steps: Steps) -> dict[str, Any]:
    """``bin_s`` virtual seconds a bin, and of each bin the most requests of a step and the tokens computed.

    A step belongs to each bin that it touches; its tokens are dealt among them evenly.
    """
    bin_seconds = (steps.ends[-1] if steps.ends else 0.0) / NUM_BINS
    lines = {name: [0.0] * NUM_BINS for name in _SUMMED_UP}
    for number, (start, end) in enumerate(zip(steps.starts, steps.ends, strict=True)):
        if not bin_seconds:  # steps that take no virtual time
            break
        first = min(NUM_BINS - 1, int(start / bin_seconds))
        last = max(first, min(NUM_BINS - 1, math.ceil(end / bin_seconds) - 1))
        for index in range(first, last + 1):
            lines["requests"][index] = max(lines["requests"][index], steps.requests[number])
            for name in ("prefill_tokens", "decode_tokens"):
                lines[name][index] += getattr(steps, name)[number] / (last - first + 1)
    return {"bin_s": bin_seconds, **lines}


def in_bins(name: str, values: Sequence[float], most: int) -> list[float]:
    """A line of a timeline in as many bins as divide NUM_BINS evenly, ``most`` of them at most."""
    count = max(count for count in range(1, max(1, most) + 1) if NUM_BINS % count == 0)
    each = NUM_BINS // count
    return [_SUMMED_UP[name](values[first : first + each]) for first in range(0, NUM_BINS, each)]


def histogram(cold: array[int], hot: array[int]) -> dict[str, list[Any]]:
    """Builds by time: ``from_us``, where each bin begins (1, 2 or 5 times a power of ten), and the builds in it, cold
    and hot. A bin ends where the next begins."""
    given = {"cold": cold, "hot": hot}
    present = [np.frombuffer(times, np.int64) for times in given.values() if len(times)]
    if not present:
        return {"from_us": [], **{name: [] for name in given}}
    every = np.concatenate(present)
    edges = _edges(max(1, int(every.min())), max(1, int(every.max())))
    bounds = [0, *edges[1:], np.iinfo(np.int64).max]
    counts = {
        name: np.histogram(np.frombuffer(times, np.int64), bounds)[0].tolist() if len(times) else []
        for name, times in given.items()
    }
    return {"from_us": [edge / 1000 for edge in edges], **counts}


def _edges(low: int, high: int) -> list[int]:
    """1, 2 and 5 of each power of ten, from the last up to ``low`` to the last up to ``high``."""
    powers = range(len(str(high)))
    every = [digit * 10**power for power in powers for digit in (1, 2, 5) if digit * 10**power <= high]
    first = max(index for index, edge in enumerate(every) if edge <= low)
    return every[first:]
