"""Runs programs of the persistent builder, and of adopted steps, in a process of its own.

    PYTHONPATH=tests python -m fuzz.steps FIRST COUNT [SECONDS]

On a GPU where there is one, else on a CPU. FIRST is the seed of the first program; none begins after SECONDS. One of
four runs on numba's kernels. Each program that fails is printed with its seed; the exit code is 1 then.
"""

import random
import sys
from contextlib import closing
from typing import Any

import torch
from fuzz.seeds import run_seeds
from fuzz.steps.adopted_program import AdoptedProgram
from fuzz.steps.program import Program

STEPS = 12


def run(seed: int) -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    made: type[Any] = AdoptedProgram if seed % 3 == 0 else Program
    with closing(made(random.Random(seed), "numba" if seed % 4 == 0 else "cython", device)) as program:
        for _ in range(STEPS):
            program.step()


if __name__ == "__main__":
    sys.exit(1 if run_seeds("steps", run, *map(int, sys.argv[1:])) else 0)
