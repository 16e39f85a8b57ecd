"""What a program of ``fuzz.steps`` draws before its first step: groups, limits, kinds of drafts, transport, fields."""

from __future__ import annotations

import dataclasses
import importlib.util
import random

from fuzz.steps.rows import Group, Rank

from attncore.builder import KVCacheGroup, StateGroup
from attncore.builder.fields import ARRAYS

MAX_REQS, MODEL_LEN, MAX_TOKENS, MAX_ENCODER = 5, 48, 64, 10
NUM_BLOCKS = 800
WORDS = sorted(ARRAYS)
HAS_TRITON = importlib.util.find_spec("triton") is not None


@dataclasses.dataclass
class Settings:
    kernels: str
    groups: list[KVCacheGroup]
    states: list[StateGroup]
    rank: Rank | None = None
    threshold: int = 1
    trees: bool = False
    spans: bool = False
    overlap: bool = False
    depth: int = 2
    transport: str = "auto"
    backend: bool = False
    pad_seq_len: int = 0
    planned: bool = False
    """Whether backends plan each step."""
    poison: bool = False
    device: str = "cpu"
    device_needs: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Of each group's backend."""

    @property
    def kernel_groups(self) -> dict[str, Group]:
        return {one.name: Group(one.name, one.kernel_block_size or one.block_size, one.cross) for one in self.groups}

    @property
    def cross(self) -> Group | None:
        return next((group for group in self.kernel_groups.values() if group.cross), None)

    @property
    def sent(self) -> bool:
        """Whether steps are sent, so that host and device may differ."""
        return self.transport != "auto"

    @property
    def lags(self) -> bool:
        """Whether the device is kept behind the host, and what it found is looked at later."""
        return self.device != "cpu"

    @property
    def may_have_others(self) -> bool:
        """Whether another builder over the batch makes the same steps but for trees."""
        return self.rank is None and not self.states


def draw_settings(draw: random.Random, kernels: str, device: str) -> Settings:
    sizes, groups, states, rank = [1, 2, 3, 4, 8, 16], [], [], None
    special = draw.choice(["none", "none", "rank", "states", "trees", "spans", "overlap", "overlap", "trees and spans"])
    for number in range(draw.choice([1, 1, 2, 3])):
        size = draw.choice(sizes)
        window = draw.choice([1, 3, 6, 9]) if special != "rank" and draw.random() < 0.3 else None
        if special == "rank":
            rank = rank or Rank(draw.choice([2, 3]), 0, 1)
            size *= rank.world
        each = draw.choice([1, 1, 2, 3])
        groups.append(KVCacheGroup(f"g{number}", size * each, kernel_block_size=size, sliding_window=window))
    if rank is not None:
        own = {group.kernel_block_size // rank.world for group in groups}
        own_size = own.pop()
        if own:  # ranks have one block size
            groups = groups[:1]
            own_size = groups[0].kernel_block_size // rank.world
        interleave = draw.choice([one for one in (1, 2, 4) if own_size % one == 0])
        rank = Rank(rank.world, draw.randrange(rank.world), interleave)
    elif draw.random() < 0.25:
        size = draw.choice([2, 4])
        groups.append(KVCacheGroup("cross", size * draw.choice([1, 2]), kernel_block_size=size, cross=True))
    if special == "states":
        states = [StateGroup(f"s{number}", num_slots=40) for number in range(draw.choice([1, 2]))]
    found = Settings(kernels, groups, states, rank, depth=draw.choice([1, 2, 2, 3]), device=device)
    found.trees, found.spans, found.overlap = "trees" in special, "spans" in special, special == "overlap"
    found.backend = draw.random() < 0.75
    found.transport = "copy" if found.overlap or draw.random() < 0.6 else "auto"
    if found.transport == "copy" and not found.overlap and kernels == "cython" and HAS_TRITON and draw.random() < 0.3:
        found.transport = "graph"
    if device != "cpu":
        found.backend, found.transport = True, draw.choice(["copy", "graph"])
    found.planned = found.backend and draw.random() < 0.3
    found.poison = draw.random() < 0.15
    if special != "states" and not (rank and found.backend):
        found.threshold = draw.choice([3, 6]) if found.trees else draw.choice([2, 4] if found.overlap else [1, 2, 4])
    found.pad_seq_len = draw.choice([0, 1]) if found.backend else 0
    draw_needs(draw, found)
    return found


def draw_needs(draw: random.Random, settings: Settings) -> None:
    """Which fields the backends declare."""
    settings.device_needs = {
        group.name: frozenset(draw.sample(WORDS, draw.randint(0, len(WORDS)))) if settings.backend else frozenset()
        for group in settings.groups
    }
