"""Interrupts calls on batches and builders by alarms, many thousand of them, and looks at each state that they leave.

    python tests/alarms.py --alarms 400000

A signal's handler raises in the middle of a call, once or several times in a row. Afterwards the call must have
happened fully or not at all, and every later call must give what the model says (``interrupted_calls``). The tests run
a short version (``tests/builder/persistent/test_interrupts.py``).
"""

import argparse
import contextlib
import random
import time
from collections import Counter, defaultdict

from interrupted_calls import ByAlarm, Engine

KINDS = [
    {"groups": groups, "kernels": kernels, "fills": fills, "transport": transport}
    for groups in ("one group", "windows", "cross")
    for kernels in ("cython", "numba")
    for fills, transport in ((False, "auto"), (True, "auto"), (True, "copy"))
]
CALLS_OF_AN_ENGINE = 3000
"""Then a new one begins, with other requests."""
CALLS_TO_COMPILE = 400
"""Not interrupted, for numba compiles at first use, and what an exception leaves of its compiler is its own."""


def raise_alarms(count, *, kinds=KINDS, seed=0, seconds=float("inf")):
    """Makes calls until ``count`` alarms have raised in one: how many did, and in calls of which name."""
    draw, fired, durations = random.Random(seed), Counter(), defaultdict(lambda: 50e-6)
    for kind in kinds:
        engine = Engine(seed, **kind)
        for _ in range(CALLS_TO_COMPILE if kind["kernels"] == "numba" else 0):
            engine.call(*engine.next_call()[1:], contextlib.nullcontext())
    end = time.monotonic() + seconds
    while sum(fired.values()) < count and time.monotonic() < end:
        seed += 1
        kind = kinds[seed % len(kinds)]
        engine = Engine(seed, **kind)
        for _ in range(CALLS_OF_AN_ENGINE):
            name, function, change = engine.next_call()
            key = name, *kind.values()
            delay = draw.uniform(1e-6, 1.3 * durations[key])
            alarm = ByAlarm(delay, [draw.uniform(1e-6, 60e-6) for _ in range(draw.choice([0, 0, 1, 2]))])
            try:
                engine.call(function, change, alarm)
            except BaseException as error:
                raise AssertionError(f"engine {seed} ({kind}): {name} after {sum(fired.values())} alarms") from error
            fired[name] += alarm.fired
            if not alarm.fired:  # what the whole call takes; drawn from longer ones, so that some are not interrupted
                durations[key] += 0.1 * (alarm.took - durations[key])
            elif delay > durations[key]:
                durations[key] = delay
            if sum(fired.values()) >= count or time.monotonic() > end:
                break
    return fired


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alarms", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the longest that it takes")
    parser.add_argument("--kernels", choices=["cython", "numba"], help="both, where it is left out")
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if arguments.kernels in (None, kind["kernels"])]
    start = time.monotonic()
    fired = raise_alarms(arguments.alarms, kinds=kinds, seed=arguments.seed, seconds=arguments.seconds)
    print(f"{sum(fired.values())} alarms in {time.monotonic() - start:.0f} s: no inconsistent state")
    print(", ".join(f"{name} {count}" for name, count in fired.most_common()))


if __name__ == "__main__":
    main()
