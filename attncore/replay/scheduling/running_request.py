"""A request of a replay between its arrival and its last token: what it has computed, and the blocks it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attncore.replay.traces.trace import Request

Tables = list[list[int]]
"""Blocks, one list a group."""


class RunningRequest:
    """A request under way. ``goal`` tokens are computed as a prompt before it decodes: the prompt, and after a
    preemption also what it had generated; ``computed`` of its tokens are in the cache, and there are blocks for
    ``room``. A block that a window has passed is 0 in its group's table."""

    __slots__ = ("computed", "generated", "goal", "keys", "published", "request", "room", "row", "tables")

    def __init__(self, request: Request, keys: list[list[Hashable]]) -> None:
        self.request = request
        self.row = request.row
        self.keys = keys
        self.tables: Tables = [[] for _ in keys]
        self.published = [0] * len(keys)  # blocks, a group
        self.generated = 0
        self.goal = request.prompt_tokens
        self.computed = 0
        self.room = 0

    @property
    def blocks(self) -> list[int]:
        """Those of the first group."""
        return self.tables[0]
