"""Captured sizes of a program: graphs that look at the step's fields where they were captured, on the device alone."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from fuzz.steps.compared import Comparer, Part
from fuzz.steps.rows import Row
from fuzz.steps.settings import WORDS, Settings

from attncore.graphs import capturing, launch, new_graph

PLACES = {"paged_kv_indices": "page_buffer"}
"""Fields of another shape in each step, and where a graph finds them."""


class Snapshot:
    """What a graph reads of a step, where it stores that; the counts are those of ``metadata``."""

    def __init__(self, metadata: Any, names: frozenset[str]) -> None:
        self._metadata, self._read = metadata, {}
        self.host = None
        for name in sorted(names):
            if hasattr(metadata, name):
                self._read[name] = launch(read, metadata, PLACES.get(name, name))

    def __getattr__(self, name: str) -> Any:
        if name in WORDS and name not in self._read:
            raise AttributeError(name)  # nor has the capture's step it
        return self._read[name] if name in self._read else getattr(self._metadata, name)


def read(metadata: Any, name: str) -> Any:
    """A copy of a field, or None."""
    found = getattr(metadata, name)
    if found is None:
        return None
    return found.clone() if isinstance(found, torch.Tensor) else found.copy()


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
        # Page lists that nobody declares, or that are not sent, are there behind a replay, and not inside it.
        declared = frozenset.intersection(*settings.device_needs.values()) if settings.sent else frozenset()
        self.names -= {"paged_kv_indices"} - declared
        self.waiting: deque[Part] = deque()
        """What the next replays see."""
        one_each = padded[2] == 1 and not self.of_tokens
        self.ahead = settings.sent and settings.rank is None and not settings.planned and one_each
        """Whether steps of this size may run ahead."""
        self.graphs: dict[int, Any] = {}
        """By the steps that each runs."""
        self.seen: dict[int, list[dict[str, Snapshot]]] = {}
        """What each graph has read of each of its steps, by group."""
        for count in (1, 2, 3) if self.ahead and settings.transport == "copy" else (1,):
            self.graphs[count], self.seen[count] = new_graph(settings.device), []
            self._warm_up()
            with capturing(self.graphs[count]):
                for index in range(count):
                    if index:
                        metadata.record_next()
                    elif settings.transport == "graph" and settings.device == "cpu":
                        launch(metadata.record)  # whose nodes run on the host
                    else:
                        metadata.record()
                    self.seen[count].append({name: Snapshot(one, self.names) for name, one in metadata.groups.items()})
            if settings.transport != "graph" and settings.device == "cpu":  # nodes find no step in the capture
                self._compare([self.part([], [])] * count)

    def _warm_up(self) -> None:
        """What is asked for is sent from here on; nodes have not fetched the empty step."""
        for of_group in self.metadata.groups.values():
            for name in self.names:
                getattr(of_group, name, None)

    def part(self, rows: list[Row], host_rows: list[Row], how: str = "captured", metadata: Any = None) -> Part:
        of = self.metadata if metadata is None else metadata
        return Part(dict(of.groups), rows, host_rows, (how,), self.settings.rank, self.padded,
                    of_tokens=self.of_tokens, whole=metadata is not None, names=False)  # fmt: skip

    def replayed(self) -> None:
        """Compares what the graph of as many steps as were expected has read."""
        parts = list(self.waiting)
        self.waiting.clear()
        self._look_at_plan(parts[-1])
        self._compare(parts)

    def _compare(self, parts: list[Part]) -> None:
        for part, seen in zip(parts, self.seen[len(parts)], strict=True):
            self.comparer.compare(replace(part, metadata=seen), names=self.names, sides=("device",))

    def _look_at_plan(self, part: Part) -> None:
        """What was kept of a step, and its number, are those of the one that is replayed."""
        if part.requests and self.settings.planned and self.settings.device == "cpu":  # Python does not run there
            for one in self.metadata.groups.values():
                assert one.kept == {"planned": self.step}, (*part.how, one.kept, self.step)

    def expect(self, part: Part) -> None:
        self.step = part.any.step if part.metadata else -1
        self.waiting.append(replace(part, metadata={}, how=(*part.how, "captured"), whole=False, names=False))
