"""Devices and patterns of devices: ``cuda:sm_90`` is one, ``cuda:sm_80+`` a pattern of many.

A host's device is ``cpu``, ``cuda:sm_<n>`` or ``rocm:gfx<id>``. A pattern is a device, a device followed by ``+``
(CUDA: this compute capability and later), a prefix followed by ``*`` (ROCm: ``rocm:gfx11*``), a platform (``cuda``), or
``any``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from attncore.quoted import quoted

_DEVICE = re.compile(r"cpu|cuda:sm_[0-9]{2,3}|rocm:gfx[0-9]{1,3}[0-9a-f]{2}")
_PATTERN = re.compile(
    r"any|cpu|cuda|rocm|cuda:sm_[0-9]{2,3}\+?|rocm:gfx[0-9]{1,3}[0-9a-f]{2}|rocm:gfx[0-9]{1,3}[0-9a-f]{0,2}\*"
)
PATTERNS = "any, cpu, cuda, cuda:sm_90, cuda:sm_80+, rocm, rocm:gfx942, rocm:gfx11*"
_PLATFORMS = ("any", "cpu", "cuda", "rocm")
"""In the order in which texts name them."""
_SOLD_AS = {
    "v100": "sm_70", "t4": "sm_75", "a100": "sm_80", "a10": "sm_86", "a40": "sm_86", "l4": "sm_89", "l40": "sm_89",
    "l40s": "sm_89", "h100": "sm_90", "h200": "sm_90", "gh200": "sm_90", "b200": "sm_100", "gb200": "sm_100",
    "mi210": "gfx90a", "mi250": "gfx90a", "mi250x": "gfx90a", "mi300a": "gfx942", "mi300x": "gfx942",
    "mi325x": "gfx942", "mi350x": "gfx950", "mi355x": "gfx950",
}  # fmt: skip
"""What people call a device, for the error that tells its name here."""


class Match(NamedTuple):
    """The entry of a spec's ``devices`` for a device: its priority, its pattern, and how specific the pattern is."""

    priority: int
    pattern: str
    specificity: tuple[int, int]


def canonical(device: str) -> str:
    """The full name of a device given in full or bare (``sm_90``, ``gfx942``); else ValueError naming ``device``."""
    name = device.strip().lower() if isinstance(device, str) else ""
    if name.startswith("sm_"):
        name = f"cuda:{name}"
    elif name.startswith("gfx"):
        name = f"rocm:{name}"
    if not _DEVICE.fullmatch(name):
        sold_as = _SOLD_AS.get(name)
        hint = f"; {name.upper()} is {sold_as}" if sold_as else ""
        raise ValueError(
            f"device: {quoted(device)} is not a device; write cuda:sm_90, sm_90, rocm:gfx942, gfx942 or cpu{hint}"
        )
    return name


def is_pattern(pattern: object) -> bool:
    """Whether a spec may name ``pattern`` among its devices."""
    return isinstance(pattern, str) and _PATTERN.fullmatch(pattern) is not None


@lru_cache(maxsize=4096)
def specificity(pattern: str, device: str) -> tuple[int, int] | None:
    """How closely ``pattern`` describes ``device`` (a larger tuple is closer); None where it does not match."""
    if pattern == device:
        return (3, 0)
    if pattern == "any":
        return (0, 0)
    platform, _, arch = device.partition(":")
    if pattern == platform:
        return (1, 0)
    if pattern.endswith("+") and platform == "cuda" and pattern.startswith("cuda:"):
        floor = int(pattern[len("cuda:sm_") : -1])
        return (2, floor) if int(arch[len("sm_") :]) >= floor else None
    if pattern.endswith("*") and device.startswith(pattern[:-1]):
        return (2, len(pattern))
    return None


def best_match(devices: Mapping[str, int], device: str) -> Match | None:
    """The entry of a spec's ``devices`` that describes ``device`` most closely; None where none does."""
    best = None
    for pattern, priority in devices.items():
        close = specificity(pattern, device)
        if close is not None and (best is None or close > best.specificity):
            best = Match(priority, pattern, close)
    return best


def in_order(patterns: Iterable[str]) -> list[str]:
    """Devices and patterns of them as a text names them: platform by platform, from the oldest hardware to the newest.

    The order in which a spec declares them means nothing: of several that match, the most specific counts.
    """
    return sorted(patterns, key=_place)


def without_contained(patterns: Iterable[str]) -> list[str]:
    """The same devices ``in_order``, without the patterns that another one contains: of ``cuda:sm_80+`` and
    ``cuda:sm_90``, the first. For a text that says which devices there are, and not with which priority.
    """
    return list(_without_contained(tuple(patterns)))


@lru_cache(maxsize=256)  # a negotiation asks it for each variant that it refuses
def _without_contained(patterns: tuple[str, ...]) -> tuple[str, ...]:
    named: list[str] = []
    for one in in_order(patterns):  # two may say the same: the first stays
        if not any(_covers(other, one) for other in named):
            named = [other for other in named if not _covers(one, other)] + [one]
    return tuple(named)


def _covers(wide: str, narrow: str) -> bool:
    return not _DEVICE.fullmatch(wide) and _contains(wide, narrow)


def _place(pattern: str) -> tuple[int, int, str, bool]:
    """Platform, generation, what follows that in a name of AMD's, and whether it is one device (``+`` comes after it).

    Of ``gfx90a`` the generation is 9, of ``gfx1100`` 11: one digit, or two that begin with a 1.
    """
    platform, _, arch = pattern.partition(":")
    number = arch.rstrip("+*").removeprefix("sm_").removeprefix("gfx")
    digits = len(number) if platform == "cuda" else 2 if number.startswith("1") else 1
    generation = int(number[:digits].ljust(digits, "0") or 0)
    return _PLATFORMS.index(platform), generation, number[digits:], pattern.endswith("+")


def _contains(wide: str, narrow: str) -> bool:
    """Whether every device of ``narrow`` is one of ``wide``, another pattern of several devices."""
    if wide == narrow:
        return False
    return wide == "any" or (":" in narrow and specificity(wide, narrow.rstrip("+*")) is not None)
