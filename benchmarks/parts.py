"""Clocks inside a running step: what each part of it took, step by step, without what ran inside of that part."""

import statistics
from contextlib import contextmanager
from functools import wraps
from time import perf_counter_ns

import numpy as np


class Parts:
    """Nanoseconds of each part of each step, the parts inside of it taken out. A clock itself adds about 0.5 us."""

    def __init__(self):
        self.steps, self._inner, self._now = [], 0, {}

    def around(self, call, name):
        @wraps(call)
        def timed(*args, **options):
            outer, self._inner = self._inner, 0
            start = perf_counter_ns()
            try:
                return call(*args, **options)
            finally:
                taken = perf_counter_ns() - start
                self._now[name] = self._now.get(name, 0) + taken - self._inner
                self._inner = outer + taken

        return timed

    @contextmanager
    def part(self, name):
        """The same around a block, for parts that are no call of their own; it adds about 1 us."""
        outer, self._inner = self._inner, 0
        start = perf_counter_ns()
        try:
            yield
        finally:
            taken = perf_counter_ns() - start
            self._now[name] = self._now.get(name, 0) + taken - self._inner
            self._inner = outer + taken

    def end_step(self, count=1):
        """Everything since the last call was one step, or ``count`` of them."""
        self.steps.append({name: taken / count for name, taken in self._now.items()})
        self._now = {}

    def clear(self):
        self.steps, self._now = [], {}

    def table(self, only=None):
        """Microseconds by part: median, p90 and p99 over the steps (a step without the part counts as 0)."""
        names = dict.fromkeys(name for step in self.steps for name in step if only is None or name in only)
        return {name: of([step.get(name, 0) for step in self.steps]) for name in names}

    def sums(self, names):
        """The same of the sum of several parts."""
        return of([sum(step.get(name, 0) for name in names) for step in self.steps])


def of(nanoseconds):
    """Median, p90 and p99 in microseconds."""
    p90, p99 = np.percentile(nanoseconds, (90, 99))
    rows = {"median": statistics.median(nanoseconds), "p90": p90, "p99": p99}
    return {name: round(float(value) / 1000, 2) for name, value in rows.items()}
