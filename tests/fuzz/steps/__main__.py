"""Runs programs in a process of its own.

    PYTHONPATH=tests python -m fuzz.steps FIRST COUNT [SECONDS]

FIRST is the seed of the first program; none begins after SECONDS. One of four runs on numba's kernels. Each program
that fails is printed with its seed; the exit code is 1 then.
"""

import math
import random
import sys
import time
import traceback
from contextlib import closing

import torch
from fuzz.steps.program import Program

STEPS = 12


def main(first: int, count: int, seconds: float = math.inf) -> int:
    """How many of ``count`` programs failed."""
    torch.set_num_threads(1)
    ran = failed = 0
    end = time.monotonic() + seconds
    for seed in range(first, first + count):
        if time.monotonic() > end:
            break
        ran += 1
        try:
            with closing(Program(random.Random(seed), "numba" if seed % 4 == 0 else "cython")) as program:
                for _ in range(STEPS):
                    program.step()
        except Exception:
            failed += 1
            print(f"seed {seed}:")
            traceback.print_exc(limit=-6, file=sys.stdout)
    print(f"{ran - failed} programs passed, {failed} failed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(*map(int, sys.argv[1:])) else 0)
