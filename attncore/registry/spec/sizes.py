"""Sets of sizes that a spec accepts: a finite set, or the multiples of a number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt, lcm
from typing import Any


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Every positive multiple of ``base``, up to ``maximum`` (included) where one is given."""

    base: int
    maximum: int | None = None

    def __post_init__(self) -> None:
        for name in ("base", "maximum"):
            value = getattr(self, name)
            if value is None and name == "maximum":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {value!r} is not a positive integer")
        if self.maximum is not None and self.maximum < self.base:
            raise ValueError(f"maximum: {self.maximum} leaves no multiple of {self.base}")

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and size > 0 and size % self.base == 0 and size <= (self.maximum or size)

    def __str__(self) -> str:
        words = "any size" if self.base == 1 else f"multiples of {self.base}"
        return words if self.maximum is None else f"{words} up to {self.maximum}"


Sizes = frozenset[int] | MultipleOf


def as_sizes(name: str, value: object) -> Sizes:
    """``value`` as sizes; ValueError beginning with ``name`` unless it is a MultipleOf or a collection of positive
    integers.
    """
    if isinstance(value, MultipleOf):
        return value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name}: {value!r} is neither a MultipleOf nor a set of sizes")
    sizes = list(value)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: {size!r} is not a positive integer")
    if not sizes:
        raise ValueError(f"{name}: no size is declared")
    return frozenset(sizes)


def describe(sizes: Sizes) -> str:
    """Sizes in a sentence."""
    return str(sizes) if isinstance(sizes, MultipleOf) else ", ".join(str(size) for size in sorted(sizes))


def as_json(sizes: Sizes) -> Any:
    """A sorted list, or ``{"multiple_of": n, "maximum": m}``."""
    if isinstance(sizes, MultipleOf):
        return {"multiple_of": sizes.base, "maximum": sizes.maximum}
    return sorted(sizes)


def intersection(first: Sizes, second: Sizes) -> Sizes:
    """Sizes that both accept; an empty frozenset where there is none."""
    if isinstance(first, frozenset):
        return frozenset(size for size in first if size in second)
    if isinstance(second, frozenset):
        return frozenset(size for size in second if size in first)
    base = lcm(first.base, second.base)
    bounds = [bound for bound in (first.maximum, second.maximum) if bound is not None]
    if bounds and min(bounds) < base:
        return frozenset()
    return MultipleOf(base, min(bounds) if bounds else None)


def divisors_within(sizes: Sizes, whole: int) -> list[int]:
    """The sizes that divide ``whole``, largest first."""
    if isinstance(sizes, frozenset):
        return sorted((size for size in sizes if whole % size == 0), reverse=True)
    if whole % sizes.base:
        return []
    rest = whole // sizes.base
    small = [one for one in range(1, isqrt(rest) + 1) if rest % one == 0]
    found = {sizes.base * factor for one in small for factor in (one, rest // one)}
    return sorted((size for size in found if size in sizes), reverse=True)


def smallest(sizes: Sizes) -> int:
    """The smallest size accepted."""
    return sizes.base if isinstance(sizes, MultipleOf) else min(sizes)
