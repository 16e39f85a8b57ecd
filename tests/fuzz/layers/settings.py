"""What a program of ``fuzz.layers`` runs over: sizes, groups and layers, drawn from what a backend has."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from attncore import KVCacheGroup
from attncore.builder import StateGroup


@dataclass(frozen=True)
class Sizes:
    """What a backend under test takes; each program draws one of each."""

    head_sizes: tuple[int, ...] = (8, 16, 24)
    value_sizes: tuple[int, ...] = ()
    """Sizes of a value head other than of a key head."""
    block_sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 8, 16)
    cache_dtypes: tuple[str, ...] = ("auto",)
    layouts: tuple[str, ...] = ("NHD", "HND")
    latent: float = 0.0
    """How often its caches are latent ones."""
    dtypes: tuple[str | None, ...] = (None,)
    """Of the model; None: as the backend is made."""
    tolerance: float = 2e-4
    rounding: float = 0.0
    """The largest relative error of a probability, as far as an fp8 cache makes the kernel round these."""
    model_len: int = 40
    windows: tuple[int, ...] = (1, 3, 5, 9)
    heads: tuple[tuple[int, int], ...] = ((4, 2), (4, 4), (4, 1), (2, 2), (6, 2), (1, 1), (8, 1), (5, 5), (10, 2))
    """Of queries, and of keys and values."""
    longer: tuple[int, ...] = (150, 300)
    """Lengths of a model that are drawn sometimes, with ``long_windows`` beside ``windows``."""
    long_windows: tuple[int, ...] = (17, 64, 100, 1000)


class Layer(NamedTuple):
    """A layer of ``group``, over the cache of this number among the group's."""

    group: str
    cache: int
    writes: bool
    """Whether it has keys of its own; else it reads those of the cache's first layer."""
    features: dict[str, Any]

    @property
    def whole(self) -> bool:
        """Whether it keeps no cache, so that a request comes whole."""
        return self.features.get("attn_type") == "encoder_only"


@dataclass
class Settings:
    sizes: Sizes
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    latent: bool
    block_size: int
    layout: str
    cache_dtype: str
    groups: list[KVCacheGroup] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    threshold: int = 1
    trees: bool = False
    spans: bool = False
    transport: str = "auto"
    dtype: str | None = None
    states: bool = False
    """Whether requests have a state, of recurrent layers, too."""
    kind: int = 0
    """The backend that runs its layers, of a hybrid's."""
    variants: dict[str, Settings] = field(default_factory=dict)
    """By group: sizes of layers that have others than those of the first group."""

    def of(self, group: str) -> Settings:
        """The sizes of a group's layers."""
        return self.variants.get(group, self)

    @property
    def all_groups(self) -> list[KVCacheGroup | StateGroup]:
        states = [StateGroup("states", num_slots=MAX_REQS + 3)] if self.states else []
        return [*self.groups, *states]

    @property
    def tolerance(self) -> float:
        """The largest relative error of an output."""
        return {None: self.sizes.tolerance, "float16": 5e-3, "bfloat16": 3e-2}.get(self.dtype, self.sizes.tolerance)

    @property
    def num_blocks(self) -> int:
        """Blocks of each group, of its own size."""
        return -(-self.sizes.model_len // self.block_size) * MAX_REQS + 8

    @property
    def decoders(self) -> list[KVCacheGroup]:
        return [group for group in self.groups if not group.cross]


MAX_REQS, MAX_ENCODER = 5, 12


@dataclass(frozen=True)
class Tested:
    """A backend under test."""

    make: Callable[[Settings], Any]
    features: frozenset[str]
    cuda_graph: str
    sizes: Sizes
    on_device: bool = False
    """Whether steps are sent as to a device always, also without a copy on a CPU."""
    finite: bool = False
    """Whether a cache's slots that are nobody's hold numbers, and not NaN."""
    kinds: tuple[Tested, ...] = ()
    """Of a hybrid: the backends of which each group of layers has one. ``features`` are what all have."""
    lags: bool = False
    """Whether the device is kept some steps behind the host, so that what a step reads too late has changed."""

    def features_of(self, settings: Settings) -> frozenset[str]:
        """What layers of these settings may have."""
        return self.kinds[settings.kind].features if self.kinds else self.features


def draw_first(draw: random.Random, tested: Tested) -> Settings:
    """The settings of the first group."""
    if not tested.kinds:
        return draw_settings(draw, tested.sizes)
    kind = draw.randrange(len(tested.kinds))
    return replace(draw_settings(draw, replace(tested.kinds[kind].sizes, longer=())), kind=kind)


def _draw_another(draw: random.Random, settings: Settings, tested: Tested) -> Settings | None:
    """Sizes of a later group that differ from those of the first; None where they are the same."""
    if not tested.kinds:
        if draw.random() < 0.5:
            return None
        made = draw_settings(draw, replace(settings.sizes, latent=float(settings.latent), longer=()))
        return replace(made, sizes=settings.sizes, dtype=settings.dtype)
    kind = draw.randrange(len(tested.kinds))
    made = draw_settings(draw, replace(tested.kinds[kind].sizes, longer=(), model_len=settings.sizes.model_len))
    return replace(made, kind=kind, dtype=settings.dtype)


def draw_settings(draw: random.Random, sizes: Sizes) -> Settings:
    """Sizes alone; ``draw_groups`` and ``draw_layers`` need the backend that is made of them."""
    latent = draw.random() < sizes.latent
    heads, kv_heads = draw.choice([(4, 1), (1, 1), (16, 1)]) if latent else draw.choice(sizes.heads)
    if sizes.longer and draw.random() < 0.2:
        sizes = replace(sizes, model_len=draw.choice(sizes.longer), windows=(*sizes.windows, *sizes.long_windows))
    head_size = draw.choice(sizes.head_sizes)
    others = [size for size in sizes.value_sizes if not latent or size < head_size]
    smaller = others if sizes.latent == 1.0 or draw.random() < 0.3 else []
    return Settings(
        sizes, heads, kv_heads, head_size, draw.choice(smaller) if smaller else head_size, latent,
        draw.choice(sizes.block_sizes), draw.choice(sizes.layouts), draw.choice(sizes.cache_dtypes),
        dtype=draw.choice(sizes.dtypes),
    )  # fmt: skip


def draw_groups(draw: random.Random, settings: Settings, tested: Tested) -> None:
    """One or two decoder groups, of windows and of blocks larger than the kernel's, and one of an encoder's keys."""
    features = tested.features
    size, windows = settings.block_size, settings.sizes.windows
    has_windows = "sliding_window" in features
    for number in range(draw.choice([2, 3]) if tested.kinds else draw.choice([1, 1, 2])):
        window = draw.choice(windows) if has_windows and draw.random() < 0.35 else None
        each, mine = draw.choice([1, 1, 1, 2, 3]), settings
        if number and (another := _draw_another(draw, settings, tested)) is not None:
            mine = settings.variants[f"g{number}"] = another
        settings.groups.append(
            KVCacheGroup(
                f"g{number}", each * mine.block_size, kernel_block_size=mine.block_size, sliding_window=window,
                num_blocks=mine.num_blocks,
            )
        )  # fmt: skip
    if "encoder_decoder" in features and not settings.latent and draw.random() < 0.25:
        settings.groups.append(KVCacheGroup("cross", size, cross=True, num_blocks=settings.num_blocks))
    settings.trees = "tree_mask" in features and draw.random() < 0.3
    settings.spans = "bidirectional_spans" in features and not settings.trees and draw.random() < 0.3
    settings.states = not settings.trees and draw.random() < 0.15
    drafts = not settings.states and "multi_token_decode" in features and draw.random() < 0.5
    settings.threshold = draw.choice([3, 5]) if settings.trees else draw.choice([2, 3]) if drafts else 1
    settings.transport = draw.choice(["auto", "copy"])


def draw_layers(draw: random.Random, settings: Settings, tested: Tested) -> None:
    for group in settings.groups:
        features = tested.features_of(settings.of(group.name))
        for cache in range(1 if group.cross else draw.choice([1, 1, 2])):
            for writes in (True, False)[: 1 if group.cross else draw.choice([1, 1, 2])]:
                of_layer = draw_features(draw, settings, group, features, writes)
                settings.layers.append(Layer(group.name, cache, writes, of_layer))
    features = tested.features_of(settings)
    if "encoder" in features and not settings.latent and not settings.trees and draw.random() < 0.3:
        of_layer = draw_features(draw, settings, settings.groups[0], features, True) | {"attn_type": "encoder_only"}
        settings.layers.append(Layer("g0", 0, False, of_layer))


def draw_features(
    draw: random.Random, settings: Settings, group: KVCacheGroup, features: frozenset[str], writes: bool
) -> dict[str, Any]:
    """``scale`` and what else a layer may have; a layer of a group with a window has no longer one."""
    mine = settings.of(group.name)
    found: dict[str, Any] = {"scale": draw.choice([mine.head_size**-0.5, 0.11, 0.5])}
    heads = range(mine.heads)
    if group.cross:
        found["attn_type"] = "encoder_decoder"
    elif group.sliding_window is not None:
        found["sliding_window"] = draw.choice([group.sliding_window, group.sliding_window, 1])
    elif "sliding_window" in features and draw.random() < (0.2 if writes else 0.5):
        found["sliding_window"] = draw.choice([*settings.sizes.windows, 2**31 - 1])
    if "alibi" in features and not group.cross and draw.random() < 0.2:
        found["alibi_slopes"] = [draw.choice([0.1, 0.03, 0.5, 0.0, -0.05]) for _ in heads]
    if "logits_soft_cap" in features and draw.random() < 0.2:
        found["logits_soft_cap"] = draw.choice([0.01, 1.0, 5.0, 20.0, 1e4])
    if "sinks" in features and draw.random() < 0.3:
        found["sinks"] = [draw.choice([-1.5, 0.0, 0.5, 3.0, 20.0, -math.inf]) for _ in heads]
    return found
