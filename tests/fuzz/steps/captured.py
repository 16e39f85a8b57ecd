"""Captured sizes of a program: graphs that look at the step's fields where they were captured, on the device alone."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

from fuzz.steps.compared import Comparer, Part
from fuzz.steps.rows import Row
from fuzz.steps.settings import WORDS, Settings

from attncore.graphs import capturing, launch, new_graph


class CapturedSize:
    """``metadata`` is what ``capture`` gave; ``padded`` its rows, tokens and tokens a row."""

    def __init__(
        self, draw: random.Random, settings: Settings, comparer: Comparer, metadata: Any, bucket: Any,
        padded: tuple[int, int, int],
    ) -> None:  # fmt: skip
        self.draw, self.settings, self.comparer, self.metadata, self.padded = draw, settings, comparer, metadata, padded
        self.bucket = bucket
        self.of_tokens = isinstance(bucket, tuple)
        self.names = frozenset(draw.sample(WORDS, draw.randint(0, len(WORDS))))
        """What the graph reads."""
        if settings.transport == "graph":  # what nobody declares is there behind a replay, and not inside it
            self.names -= {"paged_kv_indices"} - frozenset.intersection(*settings.device_needs.values())
        self.waiting: deque[Part] = deque()
        """What the next replays see."""
        one_each = padded[2] == 1 and not self.of_tokens
        self.ahead = settings.sent and settings.rank is None and not settings.planned and one_each
        """Whether steps of this size may run ahead."""
        self.graphs = {}
        for count in (1, 2, 3) if self.ahead and settings.transport == "copy" else (1,):
            self.graphs[count] = new_graph("cpu")
            self._warm_up()
            if settings.transport != "graph":  # whose nodes find no step in the capture
                self.waiting += [self.part([], [])] * count
            with capturing(self.graphs[count]):
                for index in range(count):
                    if index:
                        metadata.record_next()
                    elif settings.transport == "graph":
                        launch(metadata.record)  # whose nodes run on the host
                    else:
                        metadata.record()
                    launch(self.look)
        assert not self.waiting

    def _warm_up(self) -> None:
        """What is asked for is sent from here on; nodes have not fetched the empty step."""
        for of_group in self.metadata.groups.values():
            for name in self.names:
                getattr(of_group, name, None)

    def part(self, rows: list[Row], host_rows: list[Row], how: str = "captured", metadata: Any = None) -> Part:
        of = self.metadata if metadata is None else metadata
        return Part(dict(of.groups), rows, host_rows, (how,), self.settings.rank, self.padded,
                    of_tokens=self.of_tokens, whole=metadata is not None, names=False)  # fmt: skip

    def look(self) -> None:
        if self.waiting:
            self._look_at_plan(self.waiting[0])
            self.comparer.compare(self.waiting.popleft(), names=self.names, sides=("device",))

    def _look_at_plan(self, part: Part) -> None:
        """What was kept of a step, and its number, are those of the one that is replayed."""
        if part.requests and self.settings.planned:
            for one in self.metadata.groups.values():
                assert one.kept == {"planned": self.step}, (*part.how, one.kept, self.step)

    def expect(self, part: Part) -> None:
        self.step = part.any.step if part.metadata else -1
        self.waiting.append(replace(part, metadata=dict(self.metadata.groups), how=(*part.how, "captured"), whole=False,
                                    names=False))  # fmt: skip
