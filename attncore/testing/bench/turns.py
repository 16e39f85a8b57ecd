"""Calls timed turn by turn in one process, and the yardstick that they are compared with."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

MIN_ROUNDS, MAX_ROUNDS = 9, 200
SHORTEST_TURN = 1e-4
"""Seconds that a turn lasts at least: calls that are quicker are repeated in it."""
MAX_CALLS = 1000


@dataclass(frozen=True)
class Call:
    """What is timed: ``call``, after ``reset``, which is not timed, where there is one."""

    call: Callable[[], object]
    reset: Callable[[], object] | None = None


def in_turns(timed: Mapping[str, Call], seconds: float) -> dict[str, list[float]]:
    """Name -> the seconds of one call, for each round; a round has a turn of every name.

    As many rounds as fit in ``seconds``, between MIN_ROUNDS and MAX_ROUNDS. Who begins changes from round to round. The
    garbage collector is off.
    """
    names = list(timed)
    calls = {name: _calls_of_a_turn(one) for name, one in timed.items()}
    found: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(MAX_ROUNDS):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                found[name].append(_turn(timed[name], calls[name]))
            if number + 1 >= MIN_ROUNDS and time.perf_counter() - start > seconds:
                break
    finally:
        if collects:
            gc.enable()
    return found


def _calls_of_a_turn(timed: Call) -> int:
    quickest = min(_turn(timed, 1) for _ in range(3))  # and the call has been warmed up
    return min(MAX_CALLS, max(1, math.ceil(SHORTEST_TURN / max(quickest, 1e-9))))


def _turn(timed: Call, calls: int) -> float:
    """Seconds of a call: the mean of ``calls`` in a row, or the median of as many, each after a reset."""
    if timed.reset is None:
        return _seconds(timed.call, calls)
    found = []
    for _ in range(calls):
        timed.reset()
        found.append(_seconds(timed.call, 1))
    return statistics.median(found)


def _seconds(call: Callable[[], object], calls: int) -> float:
    count = range(calls)
    start = time.perf_counter_ns()
    for _ in count:
        call()
    return (time.perf_counter_ns() - start) / calls / 1e9


def host_yardstick() -> Call:
    """Work that no change of attncore or of a backend touches: Python's integers, and NumPy on small arrays."""
    numbers = list(range(500))
    array = np.arange(4096)

    def work() -> None:
        total = 0
        for number in numbers:
            total += number * number % 7
        (array // 16 * 16 + array % 16).cumsum()

    return Call(work)


def device_yardstick(device: str) -> Call:
    """The same for what computes on ``device``: a product of two matrices and a sum, until the device is done."""
    matrix = torch.linspace(-1, 1, 192 * 192, device=device).reshape(192, 192)
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else None

    def work() -> None:
        (matrix @ matrix).softmax(-1)
        if wait is not None:
            wait()

    return Call(work)
