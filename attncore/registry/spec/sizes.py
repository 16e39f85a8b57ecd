"""Sets of head or block sizes that a spec accepts: a finite set, or the multiples of a number."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, lcm
from typing import Any

from attncore.registry.spec.plain_values import MAX_SIZES, MOST, collection, positive


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """Every positive multiple of ``base``, up to ``maximum`` (included) where one is given."""

    base: int
    maximum: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", positive("base", self.base))
        if self.maximum is not None:
            object.__setattr__(self, "maximum", positive("maximum", self.maximum))
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
        return MultipleOf(value.base, value.maximum)  # it may be of a subclass, and be changed afterwards
    items = collection(name, value, "neither a MultipleOf nor a set of sizes", MAX_SIZES)
    sizes = frozenset([positive(name, size) for size in items])
    if not sizes:
        raise ValueError(f"{name}: no size is declared")
    return sizes


def describe(sizes: Sizes) -> str:
    """Sizes in words, for a sentence."""
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
    if min((MOST, *bounds)) < base:
        return frozenset()
    return MultipleOf(base, min(bounds) if bounds else None)


def divisors_within(sizes: Sizes, whole: int) -> list[int]:
    """The sizes that divide ``whole``, largest first."""
    if isinstance(sizes, frozenset):
        return sorted((size for size in sizes if whole % size == 0), reverse=True)
    if whole % sizes.base:
        return []
    rest = whole // sizes.base
    small = [factor for factor in range(1, isqrt(rest) + 1) if rest % factor == 0]
    divisors = {sizes.base * factor for low in small for factor in (low, rest // low)}
    return sorted((size for size in divisors if size in sizes), reverse=True)


def smallest(sizes: Sizes) -> int:
    """The smallest size accepted."""
    return sizes.base if isinstance(sizes, MultipleOf) else min(sizes)


def smallest_from(sizes: Sizes, least: int) -> int | None:
    """The smallest size accepted that is ``least`` or more; None where there is none."""
    if isinstance(sizes, MultipleOf):
        size = -(-least // sizes.base) * sizes.base
        return size if size in sizes else None
    return min((size for size in sizes if size >= least), default=None)


def largest_to(sizes: Sizes, most: int) -> int | None:
    """The largest size accepted that is ``most`` or less; None where there is none."""
    if isinstance(sizes, MultipleOf):
        return min(most, sizes.maximum or most) // sizes.base * sizes.base or None
    return max((size for size in sizes if size <= most), default=None)
