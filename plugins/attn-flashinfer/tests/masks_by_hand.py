"""The packed masks of a step's draft trees by loops: what ``packed_mask`` must give, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.testing.engines.tree_engine import paths

Tree = list[int]


class Row:
    """A request of ``length`` keys, whose tokens of the step are a tree of these parents, or a chain of so many."""

    def __init__(self, given: Tree | int, length: int) -> None:
        self.length, self.in_tree = length, not isinstance(given, int)
        self.paths = paths(given if isinstance(given, list) else list(range(-1, given - 2)))
        self.tokens = len(self.paths)

    def masks(self) -> list[int]:
        """``tree_mask`` of its tokens, as int64."""
        if not self.in_tree:
            return [0] * self.tokens
        words = [sum(1 << token for token in path) for path in self.paths]
        return [word - (1 << 64) if word >> 63 else word for word in words]

    def sees(self, window: int | None) -> npt.NDArray[np.bool_]:
        """Which of its keys each token sees."""
        context = self.length - self.tokens
        seen = np.zeros((self.tokens, self.length), dtype=np.bool_)
        for token, path in enumerate(self.paths):
            keys = [*range(context), *(context + other for other in path)]
            for key in keys if window is None else keys[-window:]:
                seen[token, key] = True
        return seen


def step_of(rows: list[Row]) -> tuple[Any, Any, Any]:
    """``tree_mask``, where tokens begin, and lengths."""
    starts = np.cumsum([0, *(row.tokens for row in rows)]).astype(np.int32)
    masks = np.array([mask for row in rows for mask in row.masks()], dtype=np.int64)
    return masks, starts, np.array([row.length for row in rows])


def drawn_rows(random: np.random.Generator) -> list[Row]:
    """Some trees, chains and single tokens behind contexts of any length."""
    rows = []
    for _ in range(int(random.integers(1, 5))):
        drafts, context = int(random.integers(0, 9)), int(random.integers(0, 40))
        tree = [int(random.integers(-1, draft)) if draft else -1 for draft in range(drafts)]
        rows.append(Row(tree if random.random() < 0.7 else drafts + 1, context + drafts + 1))
    return rows
