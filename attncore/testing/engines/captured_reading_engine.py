"""Decodes through captured graphs whose layer attends without writing: one graph writes the keys, another attends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.graphs import capturing, launch, new_graph
from attncore.show import counted
from attncore.testing.engines.captured_engine import CapturedEngine, Graph
from attncore.testing.harness.errors import ConformanceError, told

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncore.abstract import AttentionBackend, AttentionImpl
    from attncore.testing.engines.cache_view import CacheView

WRITERS = ("another layer", "write_cache")
"""Who writes the step's keys in a graph of its own."""


class CapturedReadingEngine(CapturedEngine):
    """Each size has two graphs, replayed one after the other: ``written_by``, of WRITERS, writes the step's keys; the
    layer attends with ``write=False``, with None for key and value in every other size, and with NaN.
    """

    def __init__(self, backend: AttentionBackend, tokens: int, *, written_by: str, **engine: Any) -> None:
        self.written_by = written_by
        self._writer: AttentionImpl | None = None
        self._held: list[Any] = []  # what graphs read
        super().__init__(backend, tokens, **engine)

    def _captured(self, size: int) -> tuple[Graph, Tensor]:
        if self._writer is None:  # before the first step is planned
            another = self.written_by == "another layer"
            self._writer = self.backend.impl("layers.0.writes", **self.features) if another else self.impl
        metadata = self.builder.capture(size, self.tokens_each)
        query, *new = (tensor[: size * self.tokens_each] for tensor in self.inputs)
        given = (new[0], None if self.config.use_mla else new[1], self.kv_cache, metadata)
        nothing = [
            None if tensor is None or size in (1, 4) else torch.full_like(tensor, torch.nan) for tensor in given[:2]
        ]
        self._held.append(nothing)
        writer = self._writer

        def write() -> None:
            if writer is self.impl:
                writer.write_cache(*given)
            else:
                writer.forward(query * 0.5, *given)

        def attend() -> Tensor:
            return self.impl.forward(query, nothing[0], nothing[1], self.kv_cache, metadata, write=False)

        writing, attending = new_graph(self.config.device), new_graph(self.config.device)
        self._launch(size, write)  # a warm-up, over an empty step
        self._launch(size, attend)
        with capturing(writing):
            self._record(metadata)
            self._launch(size, write)
        with capturing(attending):
            output: Tensor = self._launch(size, attend)
        return _TwoGraphs(self.cache_view, writing, attending), output

    def _launch(self, size: int, call: Callable[[], Any]) -> Any:
        try:
            return launch(call)
        except ConformanceError:
            raise
        except Exception as error:
            what = f"forward(..., write=False) where {self.written_by} has written"
            raise ConformanceError(
                f"it raises in a captured run of {counted(size, 'request')}: {what}: {told(error)}"
            ) from error


class _TwoGraphs:
    """A graph that writes the cache, and one that may change no byte of it."""

    def __init__(self, view: CacheView, writing: Graph, attending: Graph) -> None:
        self._view, self._writing, self._attending = view, writing, attending

    def replay(self) -> None:
        """Replay both; ConformanceError where the second changes the cache."""
        self._writing.replay()
        before = self._view.snapshot()
        self._attending.replay()
        if not all(map(torch.equal, self._view.snapshot(), before)):
            raise ConformanceError("forward with write=False changed the cache, in a captured graph")
