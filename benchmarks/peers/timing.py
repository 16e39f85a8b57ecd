"""Ways timed turn by turn in one process, and functions taken apart into what is measured and what is not."""

import ast
import gc
import inspect
import statistics
import textwrap
import time


class Way:
    """One call to time: ``calls`` of them a turn, after ``reset``, or each of them after one (``alone``), untimed."""

    def __init__(self, call, calls, reset=None, *, alone=False):
        self.call, self.calls, self.reset, self.alone = call, calls, reset, alone

    def turn(self):
        """Microseconds a call."""
        if self.alone:
            return statistics.median(self._timed(1) for _ in range(self.calls))
        return self._timed(self.calls)

    def _timed(self, calls):
        if self.reset is not None:
            self.reset()
        call, count = self.call, range(calls)
        start = time.perf_counter_ns()
        for _ in count:
            call()
        return (time.perf_counter_ns() - start) / calls / 1000


def interleaved(ways, rounds):
    """Name -> the median and quartiles of ``rounds`` turns, microseconds.

    A round has a turn of every way, so that all of them see the machine's slow moments. The collector is off.
    """
    turns = {name: [] for name in ways}
    names = list(ways)
    for way in ways.values():
        way.turn()
    gc.collect()
    gc.disable()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            turns[name].append(ways[name].turn())
    gc.enable()
    found = {}
    for name, values in turns.items():
        low, median, high = statistics.quantiles(values, n=4)
        found[name] = {"median": round(median, 3), "q1": round(low, 3), "q3": round(high, 3)}
    return found


def without(function, *fragments):
    """``function`` less the statements of its body that contain one of ``fragments``; each must be found.

    For timing the part of another project's function that does the work compared: the rest stays theirs.
    """
    module = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = module.body[0]
    kept, found = [], set()
    for statement in definition.body:
        text = ast.unparse(statement)
        hits = {fragment for fragment in fragments if fragment in text}
        found |= hits
        if not hits:
            kept.append(statement)
    missing = set(fragments) - found
    if missing:
        raise ValueError(f"fragments: {sorted(missing)} are not in {function.__qualname__}; is it another version?")
    definition.body, definition.decorator_list = kept, []
    ast.fix_missing_locations(module)
    names = {}
    exec(compile(module, inspect.getfile(function), "exec"), function.__globals__, names)
    return names[definition.name]
