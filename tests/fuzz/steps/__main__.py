"""Runs programs in a process of its own.

    PYTHONPATH=tests python -m fuzz.steps FIRST COUNT [SECONDS]

FIRST is the seed of the first program; none begins after SECONDS. One of four runs on numba's kernels. Each program
that fails is printed with its seed; the exit code is 1 then.
"""

import random
import sys
from contextlib import closing

from fuzz.seeds import run_seeds
from fuzz.steps.program import Program

STEPS = 12


def run(seed: int) -> None:
    with closing(Program(random.Random(seed), "numba" if seed % 4 == 0 else "cython")) as program:
        for _ in range(STEPS):
            program.step()


if __name__ == "__main__":
    sys.exit(1 if run_seeds("steps", run, *map(int, sys.argv[1:])) else 0)
