"""Tile sizes: a small fixed table by architecture. Nothing is tuned while a model is served. No torch here."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How a launch is cut up: rows (queries times the heads that share keys) and keys of a tile, wavefronts, stages."""

    rows: int
    keys: int
    warps: int
    stages: int
    slice: int = 0
    """Numbers of a head that are multiplied by keys at once; 0: all of them."""

    def heads(self, group: int) -> int:
        """Of ``group`` heads that share keys, how many one program takes: all, or even parts of no more than rows."""
        return -(-group // -(-group // self.rows))


class Architecture(NamedTuple):
    """What the table knows of an architecture."""

    wavefront: int
    """Threads of a wavefront (a warp)."""
    lds_bytes: int
    """Local memory of a workgroup, bytes."""
    units: int
    """Compute units of a usual card, where the device itself cannot be asked."""
    decode: Tile
    """For steps of few queries a sequence."""
    prefill: Tile
    wide_decode: Tile
    """The same for heads of more than 256 bytes: 256 halves, or 128 numbers in float32."""
    wide_prefill: Tile


_KIB = 1024
_CDNA = (Tile(16, 64, 4, 1), Tile(64, 64, 4, 1), Tile(16, 32, 4, 1), Tile(64, 32, 4, 1))
_RDNA = (Tile(16, 32, 8, 1), Tile(64, 16, 8, 1), Tile(16, 16, 16, 1, 32), Tile(32, 16, 16, 1, 32))
_CUDA = (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 32, 4, 3), Tile(64, 32, 4, 3))
_MMA = (Tile(16, 64, 4, 3), Tile(64, 64, 8, 3), Tile(16, 32, 4, 3), Tile(64, 32, 8, 3))
"""Where sums are kept in registers: with 4 warps the tiles for prompts would spill them."""
_TURING = (Tile(16, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1), Tile(32, 16, 8, 1))
_INTERPRETER = (Tile(16, 128, 4, 1), Tile(128, 128, 4, 1)) * 2

AMD = {
    "gfx908": Architecture(64, 64 * _KIB, 120, *_CDNA),
    "gfx90a": Architecture(64, 64 * _KIB, 104, *_CDNA),
    "gfx942": Architecture(64, 64 * _KIB, 304, *_CDNA),
    "gfx950": Architecture(64, 160 * _KIB, 256, *_CDNA),
    "gfx110*": Architecture(32, 64 * _KIB, 96, *_RDNA),
    "gfx115*": Architecture(32, 64 * _KIB, 40, *_RDNA),
    "gfx120*": Architecture(32, 64 * _KIB, 64, *_RDNA),
}
"""AMD's GPUs that Triton compiles the kernels for with matrix instructions; ``*`` stands for any one character."""

NVIDIA = {
    "sm_75": Architecture(32, 64 * _KIB, 40, *_TURING),
    "sm_80": Architecture(32, 163 * _KIB, 108, *_MMA),
    "sm_86": Architecture(32, 99 * _KIB, 84, *_MMA),
    "sm_89": Architecture(32, 99 * _KIB, 128, *_MMA),
    "sm_90": Architecture(32, 227 * _KIB, 132, *_CUDA),
    "sm_100": Architecture(32, 227 * _KIB, 148, *_CUDA),
    "sm_120": Architecture(32, 99 * _KIB, 170, *_MMA),
}
"""NVIDIA's GPUs that the kernels are compiled for in the tests, with the most that a program may have there."""

_LEAST_CUDA = Architecture(32, 99 * _KIB, 64, *_MMA)
INTERPRETER = Architecture(32, 64 * _KIB, 1, *_INTERPRETER)
"""Triton's interpreter, ``cpu``: for development."""


def known(arch: str) -> Architecture | None:
    """What the table knows of a GPU: an AMD one that it names, any NVIDIA one from sm_75 on; else None.

    An NVIDIA GPU that it does not name counts as one with the least shared memory of those since sm_80.
    """
    found = AMD.get(arch) or AMD.get(f"{arch[:-1]}*") or NVIDIA.get(arch)
    if found is None and (capability(arch) or 0) > 75:
        return _LEAST_CUDA
    return found


def capability(arch: str) -> int | None:
    """Compute capability of an NVIDIA GPU, 90 for ``sm_90``; None for anything else."""
    return int(arch[3:]) if arch.startswith("sm_") and arch[3:].isdecimal() else None


def architecture(arch: str) -> Architecture:
    """``known``, and the interpreter as ``cpu``. ValueError for another name."""
    found = INTERPRETER if arch == "cpu" else known(arch)
    if found is None:
        raise ValueError(f"arch: {arch!r} is not in the table of tiles; it has {SUPPORTED}")
    return found


SUPPORTED = f"{', '.join(AMD)}, sm_75 and later"
"""The GPUs in words."""

WIDE, WIDEST = 256, 512
MAX_SPLITS = 32
PARTS_PER_UNIT = 8
"""Programs that a launch should have for each compute unit before its keys are no longer split."""


def tile(arch: str, *, group: int, padded_size: int, itemsize: int, decode: bool) -> Tile:
    """The tile for ``group`` query heads that share keys, of ``padded_size`` numbers of ``itemsize`` bytes.

    Heads of 256 numbers in float32 get half of a wide tile; a group of more heads than a decode has rows gets
    the tile for prompts.
    """
    here = architecture(arch)
    size = padded_size * itemsize
    few = decode and group <= here.decode.rows
    if size <= WIDE:
        chosen = here.decode if few else here.prefill
    else:
        chosen = here.wide_decode if few else here.wide_prefill
        if size > WIDEST:
            chosen = chosen._replace(rows=max(16, chosen.rows // 2), keys=max(16, chosen.keys // 2))
    return chosen


def num_splits(programs: int, units: int, longest: int, keys: int) -> int:
    """Into how many parts the keys of each sequence are split: 1, 2, 4, ... ``MAX_SPLITS``.

    ``programs`` is what the launch has without, ``longest`` the keys of the longest sequence that may come. A part has
    four tiles of ``keys`` or more.
    """
    wanted = PARTS_PER_UNIT * units // max(1, programs)
    most = min(MAX_SPLITS, longest // (4 * keys), wanted)
    return 1 if most < 2 else power_of_two(most + 1) // 2


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than ``number``."""
    return 1 << (number - 1).bit_length()
