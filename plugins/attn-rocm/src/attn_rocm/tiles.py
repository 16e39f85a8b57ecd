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


_CDNA = (Tile(16, 64, 4, 1), Tile(64, 64, 4, 1), Tile(16, 32, 4, 1), Tile(64, 32, 4, 1))
_RDNA = (Tile(16, 32, 8, 1), Tile(64, 16, 8, 1), Tile(16, 16, 16, 1, 32), Tile(32, 16, 16, 1, 32))
_CUDA = (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 32, 4, 3), Tile(64, 32, 4, 3))
_INTERPRETER = (Tile(16, 128, 4, 1), Tile(128, 128, 4, 1)) * 2

ARCHITECTURES = {
    "gfx90a": Architecture(64, 65536, 104, *_CDNA),
    "gfx942": Architecture(64, 65536, 304, *_CDNA),
    "gfx950": Architecture(64, 163840, 256, *_CDNA),
    "gfx1100": Architecture(32, 65536, 96, *_RDNA),
    "gfx1201": Architecture(32, 65536, 64, *_RDNA),
}
"""The architectures that the plugin is for."""

DEVELOPMENT = {
    "sm_90": Architecture(32, 232448, 132, *_CUDA),
    "cpu": Architecture(32, 65536, 1, *_INTERPRETER),
}
"""Where the kernels are checked: an NVIDIA GPU, and Triton's interpreter."""

WIDE, WIDEST = 256, 512
MAX_SPLITS = 32
PARTS_PER_UNIT = 8
"""Programs that a launch should have for each compute unit before its keys are no longer split."""


def tile(arch: str, *, group: int, padded_size: int, itemsize: int, decode: bool) -> Tile:
    """The tile for ``group`` query heads that share keys, of ``padded_size`` numbers of ``itemsize`` bytes.

    Heads of 256 numbers in float32 get half of a wide tile; a group of more heads than a decode has rows gets
    the tile for prompts.
    """
    known = (ARCHITECTURES | DEVELOPMENT)[arch]
    size = padded_size * itemsize
    few = decode and group <= known.decode.rows
    if size <= WIDE:
        chosen = known.decode if few else known.prefill
    else:
        chosen = known.wide_decode if few else known.wide_prefill
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
