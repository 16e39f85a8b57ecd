"""The small engine whose decodes run through captured graphs, over batches that grow, shrink and change their order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from attncore.builder import MetadataBuilder
from attncore.graphs import capturing, launch, new_graph
from attncore.show import counted
from attncore.testing.engines.compare import StepRequest, compare_cache
from attncore.testing.engines.engine import JUNK, Engine
from attncore.testing.harness.errors import ConformanceError, told

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.builder import CommonAttentionMetadata

CAPTURED_SIZES = (1, 2, 4, 8)


class Graph(Protocol):
    """A captured graph: a torch.cuda.CUDAGraph, or a stand-in on other devices."""

    def replay(self) -> Any:
        """Run what was captured."""


class CapturedEngine(Engine):
    """Decodes of ``tokens`` each run through graphs of ``sizes``, all other steps without a graph; with ``any_lengths``
    decodes of one token to that many. A size is a number of rows, or rows and the tokens of all, prompts' too.

    Requests have ``longest`` tokens at most; by default some, so that many steps are cheap. Steps are made by
    ``make_builder``, MetadataBuilder unless another is given, which takes the same.
    """

    def __init__(
        self, backend: AttentionBackend, tokens: int, *, seed: int = 0, sizes: tuple[Any, ...] = (), longest: int = 0,
        make_builder: Callable[..., Any] | None = None, any_lengths: bool = False, **engine: Any,
    ) -> None:  # fmt: skip
        super().__init__(backend, seed=seed, **engine)
        self.tokens_each, self.sizes, self.any_lengths = tokens, sizes or CAPTURED_SIZES, any_lengths
        self.most_rows = max(self.size_of(size)[0] for size in self.sizes)
        self.longest = longest or max(min(3 * self.block_size, self.block_size + 64), 2 * tokens + 2)
        self.builder = (make_builder or MetadataBuilder)(
            self.batch,
            backend,
            max_num_batched_tokens=self.most_rows * self.longest,
            decode_threshold=tokens,
        )
        self.most_tokens = max(self.size_of(size)[1] for size in self.sizes)
        self.inputs = self.on_device(self.drawn.query_key_value(self.most_tokens))
        self.names = itertools.count()
        self._lses: dict[Any, Tensor] = {}  # that CUDA's graphs write to
        self.graphs = {size: self._captured(size) for size in sorted(self.sizes, key=self.size_of, reverse=True)}

    def size_of(self, size: Any) -> tuple[int, int]:
        """Rows and tokens of a captured size."""
        return size if isinstance(size, tuple) else (size, size * self.tokens_each)

    def fitting(self, num_rows: int, num_tokens: int) -> list[Any]:
        """The captured sizes that hold so many rows and tokens, ascending."""
        sizes = sorted(self.sizes, key=self.size_of)
        return [size for size in sizes if self.size_of(size)[0] >= num_rows and self.size_of(size)[1] >= num_tokens]

    def size_for(self, num_rows: int, num_tokens: int) -> Any:
        """The captured size that a step of so many rows and tokens runs in: the smallest."""
        return self.fitting(num_rows, num_tokens)[0]

    def capture(self, size: Any) -> Any:
        """The metadata that the graph of a size is captured over."""
        if isinstance(size, tuple):
            return self.builder.capture(size[0], num_tokens=size[1])
        return self.builder.capture(size, self.tokens_each)

    def _captured(self, size: Any) -> tuple[Graph, Tensor]:
        metadata = self.capture(size)
        launch(self._layer, size, metadata)  # a warm-up, over an empty step
        graph = new_graph(self.config.device)
        with capturing(graph):
            self._record(metadata)
            output: Tensor = launch(self._layer, size, metadata)
        if self.lse is not None and self.config.device.startswith("cuda"):  # a stand-in's layer gives another each time
            self._lses[size] = self.lse
        return graph, output

    def _record(self, metadata: Any) -> None:
        """Called inside a capture, before the layer."""
        metadata.record()

    def _replay(self, metadata: Any, graph: Graph) -> None:
        """Replay ``graph`` for a step that was built for its size."""
        metadata.replay(graph)

    def _layer(self, size: Any, metadata: CommonAttentionMetadata) -> Tensor:
        num_rows, num_tokens = self.size_of(size)
        try:
            return self.forward([tensor[:num_tokens] for tensor in self.inputs], metadata)
        except ConformanceError:
            raise
        except Exception as error:
            raise ConformanceError(
                f"it raises inside a captured run of {counted(num_rows, 'request')}: {told(error)}"
            ) from error

    def step(self, scheduled: Mapping[Any, int], **_: Any) -> Tensor:
        """A step without a graph, whose metadata goes to the device as an engine's does."""
        metadata = self.builder.build(self.scheduled(dict(scheduled)))
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in metadata.req_ids]
        return self.run_step(metadata, requests)

    def change(self) -> None:
        """Remove requests, add others, run their prompts beside decodes; now and then replay an empty step."""
        draw = self.random.random
        for name in list(self.batch.req_ids):
            if self._is_full(name) or draw() < 0.05:
                self.remove(name)
        wanted = int(self.random.integers(1, self.most_rows + 1))
        arrived = {}
        while len(self.batch) < wanted and (draw() < 0.5 or not len(self.batch)):
            name, length = next(self.names), int(self.random.integers(1, self.longest - self.tokens_each))
            self.add(name, length)
            arrived[name] = length
        if arrived:
            beside = {name: 1 for name in self.batch.req_ids if name not in arrived and draw() < 0.5}
            for name in beside:
                self.grow(name)
            self.step({**arrived, **beside})
            for name in self.batch.req_ids:
                if self._is_full(name):
                    self.remove(name)
        if draw() < 0.1:
            self.replay_empty()

    def replay_empty(self) -> None:
        """Replay an empty step of some size, which writes nothing."""
        size = self.sizes[int(self.random.integers(len(self.sizes)))]
        before = self.cache_view.snapshot()
        self._replay(self.builder.build_empty(size), self.graphs[size][0])
        compare_cache(self.cache_view, before, np.empty(0, np.int64), masked=True)

    def _is_full(self, name: Any) -> bool:
        return self.context(name) + self.tokens_each > self.longest

    def replayed(self) -> None:
        """``replay`` of some of the requests."""
        chosen = [name for name in self.batch.req_ids if self.random.random() < 0.8]
        if chosen:
            self.replay(chosen)

    def replay(self, chosen: list[Any]) -> None:
        """Run a step of these requests in their graph; compare its output and what it wrote."""
        fewest = 1 if self.any_lengths else self.tokens_each
        scheduled = {name: int(self.random.integers(fewest, self.tokens_each + 1)) for name in chosen}
        for name, tokens in scheduled.items():
            self.grow(name, tokens)
        self.replay_step(scheduled)
        self._reject_drafts(scheduled)

    def replay_step(self, scheduled: Mapping[Any, int]) -> None:
        """Run so many tokens of each request in a graph that holds them; compare its output and what it wrote."""
        count = sum(scheduled.values())
        # In turns: NaN in slots without a token, and in rows of padding; of both, a write of NaN would not show.
        self.junk = math.nan if self.junk == self.junk else JUNK
        self.fill_unowned()
        before = self.cache_view.snapshot()
        fresh = self.drawn.query_key_value(count)
        for held, new in zip(self.inputs, fresh, strict=True):
            held[:count].copy_(new)
        size = self.size_for(len(scheduled), count)
        num_tokens = self.size_of(size)[1]
        self.fill_padding([held[:num_tokens] for held in self.inputs], count)
        metadata = self.builder.build(self.scheduled(dict(scheduled)), bucket=size)
        graph, output = self.graphs[size]
        self._replay(metadata, graph)
        self.lse = self._lses.get(size, self.lse)
        answer = output[:count].cpu()
        self.check_cache(before, metadata.host.slot_mapping[:count])
        requests = [StepRequest(name, scheduled[name], self.context(name)) for name in metadata.req_ids]
        self.compare(answer, self.expected(fresh, requests), requests, fresh[0])

    def _reject_drafts(self, ran: Mapping[Any, int]) -> None:
        """Take back some of the tokens of each request's last step, never the first of them."""
        rejected = {name: int(self.random.integers(0, tokens)) for name, tokens in ran.items()}
        self.batch.rollback_many(rejected)
        for name, drafts in rejected.items():
            self.history[name] = self.history[name].first(self.context(name) - drafts)
