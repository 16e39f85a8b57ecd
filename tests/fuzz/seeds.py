"""Programs of one seed each, run one after another in a process of its own."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable

import torch


def run_seeds(name: str, run: Callable[[int], None], first: int, count: int, seconds: float = math.inf) -> int:
    """How many of ``count`` programs failed, of the seeds from ``first`` on; none begins after ``seconds``.

    Each that fails is printed with its seed, and how many passed at the end.
    """
    torch.set_num_threads(1)  # several of these wait for each other longer than they compute
    ran = failed = 0
    end = time.monotonic() + seconds
    for seed in range(first, first + count):
        if time.monotonic() > end:
            break
        ran += 1
        try:
            run(seed)
        except Exception:
            failed += 1
            print(f"{name}, seed {seed}:")
            traceback.print_exc(limit=-6, file=sys.stdout)
    print(f"{name}: {ran - failed} programs passed, {failed} failed", flush=True)
    return failed
