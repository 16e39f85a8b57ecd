"""Samples of what a spec declares: values for its features, and sizes at the edges of its sets of sizes and between."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from attncore.registry.spec.sizes import MultipleOf
from attncore.testing.harness.errors import UnsupportedError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

SLOPES = (0.5, 0.0625, 0.25, 0.125)  # of no standard order, so that slopes made from a head's number show
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "sliding_window": {"sliding_window": 6},
    "logits_soft_cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": (0.5, -1.0, 2.0, 0.0)},
}
"""Feature -> arguments of ``backend.impl`` for 4 query heads; ``of_heads`` of them for fewer."""
OTHER_VALUES: Mapping[str, Mapping[str, Any]] = {
    "sliding_window": {"sliding_window": 9},
    "logits_soft_cap": {"logits_soft_cap": 4.0},
    "alibi": {"alibi_slopes": SLOPES[::-1]},
    "sinks": {"sinks": (0.0, 2.0, -1.0, 0.5)},
}
"""The same with other values, for another layer of the same model."""
LONG_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "sliding_window": {"sliding_window": 470},
    "logits_soft_cap": {"logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": (0.004, 0.0005, 0.002, 0.001)},
    "sinks": {"sinks": (9.0, 8.0, 10.0, 7.0)},
}
"""The same with values that show over a thousand keys, whose scores reach 10: slopes that leave the first key its
weight, sinks of the size of the sum, and a window of several hundred tokens that does not end with a tile of keys, be
it of 64, of 96 or of 128: a kernel may take the mask of one tile for another's."""
OF_EACH_HEAD = ("alibi_slopes", "sinks")
SCALES = (2.8, 3.6)
"""Scales of layers that have their own, over the root of the head size: 0.7 and 0.9 with heads of 16. With larger
heads the scores would else grow until their float32 is not as exact as the tolerance."""
TOGETHER = "together"
"""In place of a feature: all that are declared."""
MAX_SIZE = 512  # sizes of heads and blocks beyond it are not tried: the arithmetic of a kernel has changed before
WHOLE = 32  # a finite set of at most so many sizes is tried whole


def own_scale(backend: AttentionBackend, index: int = 0) -> float:
    """A scale for a layer of ``backend`` that is not the usual one, by which a backend that forgets it shows."""
    return SCALES[index] * float(backend.config.head_size**-0.5)


def of_heads(features: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """``features`` with the values of the first ``num_heads`` heads, where one has a value for each head.

    A latent cache has one head of keys, so that a backend with a small ``max_group_size`` has fewer query heads than
    the samples have values.
    """
    return {
        name: value[:num_heads] if name in OF_EACH_HEAD and len(value) > num_heads else value
        for name, value in features.items()
    }


def in_one_layer(declared: Collection[str], samples: Mapping[str, Mapping[str, Any]] = FEATURES) -> dict[str, Any]:
    """The arguments of a layer with all of a spec's ``declared`` features that ``samples`` has values for."""
    return {argument: value for name, given in samples.items() if name in declared for argument, value in given.items()}


def of_a_feature(
    feature: str, declared: Collection[str], samples: Mapping[str, Mapping[str, Any]] = FEATURES
) -> dict[str, Any]:
    """The arguments of a layer with ``feature``, one of ``samples`` or TOGETHER. UnsupportedError where the spec does
    not declare it, or declares fewer than two to put together."""
    wanted = [name for name in samples if name in declared and feature in (name, TOGETHER)]
    if not wanted:
        raise UnsupportedError("its spec does not declare it")
    if feature == TOGETHER and len(wanted) < 2:
        raise UnsupportedError("its spec declares fewer than two of these features")
    return in_one_layer(wanted, samples)


def edges(declared: Collection[int] | MultipleOf, most: int) -> list[int]:
    """The sizes at the edges of a set of sizes: up to six of a finite set with both ends; of multiples the first two
    and the largest, below ``most``."""
    if isinstance(declared, MultipleOf):
        found = {declared.base, 2 * declared.base, declared.maximum or 0}
        found.add(most // declared.base * declared.base)
        return sorted(size for size in found if 0 < size <= most and size in declared)
    sizes = sorted(declared)
    return sizes if len(sizes) <= 6 else [*sizes[:3], *sizes[-3:]]


def between(declared: Collection[int] | MultipleOf, usual: tuple[int, ...]) -> list[int]:
    """Declared sizes that ``edges`` leaves out: the usual ones, and all of a small set. UnsupportedError for none."""
    found = tried(declared, usual) - set(edges(declared, MAX_SIZE))
    if not found:
        raise UnsupportedError("its spec declares no usual size but those at the edges")
    return sorted(found)


def tried(declared: Collection[int] | MultipleOf, usual: tuple[int, ...]) -> set[int]:
    """The usual ones of the declared sizes, and all of a small set, to MAX_SIZE."""
    found = {size for size in usual if size in declared}
    if not isinstance(declared, MultipleOf) and len(declared) <= WHOLE:
        found = {size for size in declared if size <= MAX_SIZE}
    return found
