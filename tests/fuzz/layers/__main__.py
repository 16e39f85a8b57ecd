"""Runs programs over one backend, in a process of its own: Triton's interpreter, or the libraries of a GPU.

    PYTHONPATH=tests python -m fuzz.layers BACKEND FIRST COUNT [SECONDS]

FIRST is the seed of the first program; none begins after SECONDS. On a CPU BACKEND is ``triton`` or ``sdpa``, with
ATTNCORE_ROCM_DEV_DEVICE=cpu and TRITON_INTERPRET=1; on a GPU one of ``ON_GPU``, or several for a model whose groups run
on each, such as ``flash3+triton``. Each program that fails is printed with its seed; the exit code is 1 then.
"""

import random
import sys
from dataclasses import replace
from typing import Any

import torch
from fuzz.layers import backends
from fuzz.layers.programs import new_program
from fuzz.layers.settings import Sizes, Tested
from fuzz.seeds import run_seeds

from attncore import Host

STEPS = 10
BFLOAT16 = {"tolerance": 3e-2}
LONG: dict[str, Any] = {"longer": (150, 300, 700), "long_windows": (17, 64, 100, 200, 300, 470, 1000)}
"""Windows that end within a tile of keys, and models in which many tiles lie behind them."""
ON_GPU: dict[str, tuple[Sizes, str, dict[str, str]]] = {
    "flash2": (Sizes((64, 128), (), (256,), **BFLOAT16, model_len=600, windows=(5, 300)), "flash", {"generation": "2"}),
    "flash3": (
        Sizes((64, 96, 128, 192, 256), (), (16, 32), ("auto", "fp8_e4m3"), **BFLOAT16, rounding=2**-4, **LONG),
        "flash",
        {"generation": "3"},
    ),
    "flash3_latent": (Sizes(block_sizes=(16, 64), **backends.LATENT), "flash", {"generation": "3"}),
    "flashinfer_latent": (Sizes(block_sizes=(1, 16, 64), **backends.LATENT), "flashinfer", {}),
    "flash4": (Sizes((64,), (), (16,), **BFLOAT16), "flash", {"generation": "4"}),
    "flashinfer": (Sizes((64,), (), (1, 4, 8, 16), **BFLOAT16, **LONG), "flashinfer", {}),
    "triton": (
        Sizes((16, 64, 128, 256), (), (1, 2, 3, 4, 16), backends.EXACT, **BFLOAT16, **LONG),
        "rocm",
        {"kernel": "triton"},
    ),
}
"""Name -> sizes, the backend and its options."""


def tested(name: str) -> Tested:
    if not torch.cuda.is_available():
        dtypes = "float32", "float32", "float16", "bfloat16"
        sizes = Sizes(cache_dtypes=backends.EXACT, tolerance=2e-3, dtypes=dtypes, longer=(150,))
        if name == "triton":  # its interpreter is slow
            sizes = replace(sizes, heads=((4, 2), (2, 2), (4, 1), (3, 1), (6, 2)), longer=())
        return backends.selected(
            sizes, "cpu", Host.probe(), dtype="float32", backend="rocm", options={"rocm": {"kernel": name}}
        )
    if "+" in name:
        return replace(backends.hybrid(*map(tested, name.split("+"))), lags=True)
    sizes, backend, options = ON_GPU[name]
    return replace(backends.selected(sizes, "cuda:0", backend=backend, options={backend: options}), lags=True)


def draw_tiles(draw: random.Random) -> None:
    """Tiles of Triton's kernels, and parts into which keys are split, that another device than the interpreter has."""
    from attn_rocm import tiles

    def tile() -> tiles.Tile:
        return tiles.Tile(draw.choice([16, 16, 32, 128]), draw.choice([16, 32, 128]), 4, 1, draw.choice([0, 0, 16]))

    splits = draw.choice([1, 2, 4, 16])
    tiles.INTERPRETER = tiles.INTERPRETER._replace(decode=tile(), prefill=tile())
    tiles.num_splits = lambda *_: splits


def main(name: str, *seeds: int) -> int:
    """How many programs of ``run_seeds``'s arguments failed."""
    under_test = tested(name)

    def run(seed: int) -> None:
        draw = random.Random(seed)
        interpreted = name == "triton" and not torch.cuda.is_available()
        if interpreted:
            draw_tiles(draw)
        new_program(seed, under_test, draw).run(STEPS // 3 if interpreted else STEPS)

    return run_seeds(name, run, *seeds)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1], *map(int, sys.argv[2:])) else 0)
