"""How long the conformance kit takes over a backend with a planted fault, beside one that is right.

``PYTHONPATH=.:tests python benchmarks/kit_runs.py [ROUNDS]`` runs the command in turns over the sound backend and over
each fault, and prints medians of wall clock and of processor time, and their ratios to the sound one's.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planting import Site
from testing.fault_table import EVERY_FAULT
from testing.faulty_backend import Fault
from testing.test_planted_faults import plant_in

FAULTS = (
    "window_too_wide", "reads_unused_rows", "rows_exchanged", "ignores_write", "replays_the_lengths_of_the_capture",
    "kernel_b_is_wrong",
)  # fmt: skip


def timed(name: str, environ: dict[str, str]) -> tuple[float, float, int]:
    """Seconds of wall clock and of processor time of a run, and its exit code."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = [sys.executable, "-m", "attncore.testing", name]
    done = subprocess.run(words, env=environ, stdout=subprocess.DEVNULL, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def main(rounds: int) -> None:
    """Print a line for each backend."""
    sound = Fault("sound", "", "")
    faults = [sound, *(fault for fault in EVERY_FAULT if fault.name in FAULTS)]
    found: dict[str, list[tuple[float, float]]] = {fault.name: [] for fault in faults}
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        for fault in faults:
            plant_in(site, fault.name, fault.code, fault.facts, fault.light)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join((folder, *filter(None, sys.path)))}
        for _ in range(rounds):
            for fault in faults:
                wall, processor, code = timed(fault.name, environ)
                if code != (fault is not sound):
                    raise SystemExit(f"{fault.name}: exit code {code}")
                found[fault.name].append((wall, processor))
                print(f"{fault.name:40} {wall:6.1f} s {processor:6.1f} s", flush=True)
    base = [statistics.median(one) for one in zip(*found["sound"], strict=True)]
    print(f"{'medians':40} wall clock, processor, ratios")
    for name, times in found.items():
        wall, processor = (statistics.median(one) for one in zip(*times, strict=True))
        print(f"{name:40} {wall:6.1f} s {processor:6.1f} s {wall / base[0]:5.2f} {processor / base[1]:5.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
