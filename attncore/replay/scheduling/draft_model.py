"""A draft model that is drawn: how many tokens it proposes in a step, and how many of them turn out right."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from attncore.arguments import integer

DEFAULT_ACCEPTANCE = 0.7


@dataclass(frozen=True)
class Speculation:
    """Up to ``num_drafts`` drafts a decode, each of which, where all before it were right, is right with probability
    ``acceptance``."""

    num_drafts: int
    acceptance: float = DEFAULT_ACCEPTANCE

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_drafts", integer("num_drafts", self.num_drafts, 1))

    def __str__(self) -> str:
        return f"{self.num_drafts}:{self.acceptance:g}"


class Draft(NamedTuple):
    """The drafts of one decode: how many run, and how many of those, from the first, are accepted."""

    drafted: int = 0
    accepted: int = 0

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


NO_DRAFT = Draft()


class DraftModel:
    """Draws drafts from ``seed``."""

    def __init__(self, speculation: Speculation, seed: int) -> None:
        self.speculation = speculation
        self._random = random.Random(seed)

    def draw(self, most: int) -> Draft:
        """The drafts of a decode after whose own token ``most`` tokens are still to be generated."""
        drafted = min(self.speculation.num_drafts, most)
        accepted = 0
        while accepted < drafted and self._random.random() < self.speculation.acceptance:
            accepted += 1
        return Draft(drafted, accepted)
