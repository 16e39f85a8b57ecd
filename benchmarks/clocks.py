"""Clocks around the calls, contexts and graphs of an engine, by what their time is counted for."""

import functools
import time

from attncore.integrations.transformers import attncore_context


class Clocks:
    """Seconds spent in calls, by name."""

    def __init__(self):
        self.seconds = {}

    def __getitem__(self, name):
        return self.seconds.get(name, 0.0)

    def add(self, name, start):
        self.seconds[name] = self[name] + time.perf_counter() - start

    def around(self, call, name):
        @functools.wraps(call)
        def timed(*args, **options):
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.add(name, start)

        return timed


class ClockedContext:
    """``attncore_context`` with a clock around its beginning and its end."""

    def __init__(self, clocks, *args):
        start = time.perf_counter()
        self.clocks, self.inner = clocks, attncore_context(*args)
        clocks.add("context", start)

    def __enter__(self):
        self.clocks.around(self.inner.__enter__, "context")()

    def __exit__(self, *error):
        return self.clocks.around(self.inner.__exit__, "context")(*error)


class ClockedGraph:
    def __init__(self, graph, clocks):
        self.replay = clocks.around(graph.replay, "launch")
