"""What a replay counts and times, step by step, and how a list of numbers is summed up."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

QUANTILES = (50, 90, 99)


def _numbers() -> array[int]:
    return array("q")


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Steps:
    """One number a step each, but for the last three, which are sums.

    ``starts`` and ``ends`` are virtual seconds, times are nanoseconds of ``perf_counter_ns``. ``build_ns`` is without
    ``plan_ns``, which is empty for a backend without a plan; ``attention_ns`` is empty without attention, and holds the
    sum over layers otherwise.
    """

    starts: array[float] = field(default_factory=_seconds)
    ends: array[float] = field(default_factory=_seconds)
    build_ns: array[int] = field(default_factory=_numbers)
    plan_ns: array[int] = field(default_factory=_numbers)
    attention_ns: array[int] = field(default_factory=_numbers)
    requests: array[int] = field(default_factory=_numbers)
    decodes: array[int] = field(default_factory=_numbers)
    decode_tokens: array[int] = field(default_factory=_numbers)
    prefill_tokens: array[int] = field(default_factory=_numbers)
    drafted: int = 0
    accepted: int = 0
    passed_blocks: int = 0  # by windows


@dataclass(slots=True)
class Verification:
    """``checked`` comparisons, of which ``failed`` did not hold; ``failures`` are sentences about the first of them.

    ``max_abs_error`` is the largest difference of any output from dense attention; None where metadata is compared.
    """

    checked: int = 0
    failed: int = 0
    max_abs_error: float | None = None
    failures: list[str] = field(default_factory=list)

    MAX_SENTENCES = 10

    def fail(self, sentence: str) -> None:
        self.failed += 1
        if len(self.failures) < self.MAX_SENTENCES:
            self.failures.append(sentence)


@dataclass(slots=True)
class Outcome:
    """A finished replay. ``hot_build_ns`` are builds of the same steps with nothing between them but the scheduler."""

    steps: Steps
    hot_build_ns: array[int]
    verification: Verification
    requests: int
    preemptions: int
    prefix_hit_tokens: int
    widest_row: int  # blocks
    virtual_seconds: float
    wall_seconds: float
    kernels: str


def quantiles(numbers: array[int]) -> dict[str, int]:
    """p50, p90, p99 and max, each one of the numbers (no interpolation); all 0 where there is none."""
    values = np.frombuffer(numbers, dtype=np.int64) if len(numbers) else np.zeros(1, np.int64)
    picked = np.percentile(values, (*QUANTILES, 100), method="inverted_cdf")
    names = (*(f"p{percent}" for percent in QUANTILES), "max")
    return dict(zip(names, map(int, picked), strict=True))


def microseconds(nanoseconds: array[int]) -> dict[str, float]:
    """``quantiles`` of nanoseconds, in microseconds."""
    return {name: value / 1000 for name, value in quantiles(nanoseconds).items()}


def total(numbers: array[int]) -> int:
    values: npt.NDArray[np.int64] = np.frombuffer(numbers, dtype=np.int64) if len(numbers) else np.zeros(0, np.int64)
    return int(values.sum())
