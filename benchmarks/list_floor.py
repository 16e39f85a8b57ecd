"""How much of `attncore list` is Python's and its libraries' own? Both as whole processes, which take turns.

    python benchmarks/list_floor.py [--rounds 15] [--save FILE]

*floor* is a process that does what no implementation of the command can leave out: it imports pluggy, packaging and
importlib.metadata, and reads the entry points and the name of every distribution that is installed. *help* is `attncore
--help`. Each has the median and the quartiles in milliseconds, by the clock and of processor time, which other work on
the machine changes less. Plugins are those that are installed. Bytecode is written first, as pip does; a variable of
the shell's may forbid it.

The goal of `attncore list` with three plugins, under 200 ms by the clock, is judged by benchmarks/reach.py.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from time import perf_counter

from attncore.testing.bench.machine import machine

FLOOR = """
import pluggy, packaging.requirements, packaging.specifiers, packaging.utils, packaging.version
from importlib import metadata
for one in metadata.distributions():
    one.name, one.entry_points
"""
PROGRAMS = {
    "bare Python": ["-c", "pass"],
    "floor": ["-c", FLOOR],
    "attncore --help": ["-m", "attncore", "--help"],
    "attncore list": ["-m", "attncore", "list"],
}


def timed(words, environment):
    """Seconds by the clock and of processor time of one process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    subprocess.run([sys.executable, "-P", *words], env=environment, stdout=subprocess.DEVNULL, check=True)
    clock, after = perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def quartiles(seconds):
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median": round(middle * 1e3, 1), "q1": round(low * 1e3, 1), "q3": round(high * 1e3, 1)}


def measured(rounds):
    """Name -> the quartiles of its times, in milliseconds."""
    times = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for turn in range(-1, rounds):  # the first writes the bytecode
            for name, words in PROGRAMS.items():
                found = timed(words, environment)
                if turn >= 0:
                    times[name].append(found)
    return {
        name: dict(zip(("clock_ms", "processor_ms"), map(quartiles, zip(*found, strict=True)), strict=True))
        for name, found in times.items()
    }


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="processes of each, 2 or more (default 15)")
    parser.add_argument("--save", metavar="FILE", help="write the run as JSON")
    args = parser.parse_args(argv)
    load = [os.getloadavg()[0]]
    found = measured(args.rounds)
    load.append(os.getloadavg()[0])
    print(f"{'':16} {'clock, ms':>24} {'processor time, ms':>24}")
    for name, row in found.items():
        cells = (f"{one['median']:.0f} ({one['q1']:.0f} to {one['q3']:.0f})" for one in row.values())
        print(f"{name:16} {next(cells):>24} {next(cells):>24}")
    print(f"load of the machine: {load[0]:.1f} before, {load[1]:.1f} after; {os.cpu_count()} cores")
    if args.save:
        run = {"machine": machine(), "load": load, "rounds": args.rounds, "processes": found}
        with open(args.save, "w", encoding="utf-8") as file:
            json.dump(run, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
