"""Chunks behind long contexts, beside decodes, through one captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.testing.engines.captured_engine import CapturedEngine

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

CONTEXTS = {"long": 1030, "some": 40, "many": 530}
"""Beyond the lengths at which kernels begin to split a request's keys, and below."""
STEPS = ({"long": 70, "some": 1}, {"some": 90, "many": 5, "long": 1}, {"many": 95}, {"long": 1, "many": 1, "some": 1})
"""Tokens of each request: chunks of more than one tile of queries, of a few tokens, and decodes alone."""
SIZE = 4, 96
"""Rows and tokens of the graph."""


class CapturedLongChunksEngine(CapturedEngine):
    """Requests of these contexts, and steps of some of them in one size of four rows."""

    def __init__(self, backend: AttentionBackend, **engine: Any) -> None:
        room = max(sum(step.get(name, 0) for step in STEPS) for name in CONTEXTS)
        num_blocks = sum(-(-(context + room) // backend.config.block_size) for context in CONTEXTS.values()) + 8
        longest = max(CONTEXTS.values()) + room
        super().__init__(backend, 1, sizes=(SIZE,), longest=longest, num_blocks=num_blocks, **engine)
        for name, context in CONTEXTS.items():
            self.add(name, context)
            self.fill({name: context})

    def run(self) -> None:
        """Replay STEPS; ConformanceError where one is wrong."""
        for step in STEPS:
            for name, tokens in step.items():
                self.grow(name, tokens)
            self.replay_step(step)
