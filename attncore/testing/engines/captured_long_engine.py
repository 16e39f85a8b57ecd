"""Decodes through one captured graph whose rows have a few keys in one step and thousands in the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

CONTEXTS = {"some": 40, "longest": 3001, "one": 1, "long": 2049, "many": 700}
"""Beyond the lengths at which kernels begin to split a request's keys, and below."""
SHORTER = {"some": 40, "longest": 1101, "one": 1, "long": 530, "many": 260}
"""The same where many settings are tried, in each of which the contexts are computed first."""
STEPS = (
    ("some", "one"),
    ("longest", "long"),
    ("longest", "one", "many"),
    ("one",),
    ("some", "longest", "one", "long"),
    ("long", "many"),
    ("some",),
    ("longest",),
)
"""The requests of each step: each row grows and shrinks, so that what was planned for a step is wrong in the next."""


class CapturedLongEngine(CapturedEngine):
    """One size, of four rows; the requests of ``contexts`` stay, and each step is of some of them."""

    def __init__(
        self, backend: AttentionBackend, tokens: int, *, contexts: Mapping[str, int] = CONTEXTS, **engine: Any
    ) -> None:
        room = (len(STEPS) + 1) * tokens  # a step more where one is wrong
        num_blocks = sum(-(-(context + room) // backend.config.block_size) for context in contexts.values()) + 8
        longest = max(contexts.values()) + room
        super().__init__(backend, tokens, sizes=(4,), longest=longest, num_blocks=num_blocks, **engine)
        for name, context in contexts.items():
            self.add(name, context)
            self.fill({name: context})

    def run(self) -> None:
        """Replay STEPS; ConformanceError where one is wrong."""
        for names in STEPS:
            try:
                self.replay(list(names))
            except ConformanceError as error:
                raise ConformanceError(f"{error}{self._without_a_graph(names)}", error.max_error) from None

    def _without_a_graph(self, names: tuple[str, ...]) -> str:
        """The likely cause where the next step of these requests, which are hardly longer, is right without a graph."""
        try:
            for name in names:
                self.grow(name, self.tokens_each)
            self.step(dict.fromkeys(names, self.tokens_each))
        except Exception:
            return ""
        return "; the next step is right without a graph: it is as if a plan of an earlier step was replayed"
