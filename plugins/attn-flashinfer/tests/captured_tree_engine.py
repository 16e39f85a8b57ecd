"""Draft trees through captured graphs, over batches that grow and shrink: what each token sees, checked one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attncore.abstract import AttentionBackend
from attncore.builder import MetadataBuilder
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.captured_long_engine import CapturedLongEngine
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import JUNK
from attncore.testing.engines.tree_engine import TreeEngine


class CapturedTreeEngine(CapturedEngine, TreeEngine):
    """A CapturedEngine some of whose requests run trees of ``tokens``, others chains, in one graph; a path is kept.

    ``others`` are windows of other layers, which are planned beside the one that runs.
    """

    def __init__(
        self, backend: AttentionBackend, tokens: int, *, others: Sequence[int | None] = (), **given: Any
    ) -> None:
        copies: dict[str, Any] = {"transport": "copy"} if backend.config.device == "cpu" else {}  # as a GPU has them

        def make_builder(*arguments: Any, **keywords: Any) -> MetadataBuilder:
            for number, window in enumerate(others, 1):
                backend.impl(f"layers.{number}", scale=0.5, sliding_window=window)
            return MetadataBuilder(*arguments, **keywords, **copies, draft_trees=True)

        super().__init__(backend, tokens, make_builder=make_builder, **given)

    def replay(self, chosen: list[Any]) -> None:
        """Run a step of these requests in their graph, a tree each but for some; compare output and cache."""
        drafts, counts = self.tokens_each - 1, dict.fromkeys(chosen, self.tokens_each)
        few = self.random.random() < 0.3  # steps without a tree, or with one
        trees = {
            name: [int(self.random.integers(-1, draft)) if draft else -1 for draft in range(drafts)]
            for name in chosen
            if self.random.random() < (0.15 if few else 0.8)
        }
        for name in chosen:
            self.grow(name, self.tokens_each)
        self.junk = math.nan if self.junk == self.junk else JUNK
        self.fill_unowned()
        before = self.cache_view.snapshot()
        count = len(chosen) * self.tokens_each
        fresh = self.drawn.query_key_value(count)
        for held, new in zip(self.inputs, fresh, strict=True):
            held[:count].copy_(new)
        size = min(size for size in self.sizes if size >= len(chosen))
        self.fill_padding([held[: size * self.tokens_each] for held in self.inputs], count)
        metadata = self.builder.build(self.scheduled(counts), trees=trees, bucket=size)
        graph, output = self.graphs[size]
        metadata.replay(graph)
        self.lse = self._lses.get(size, self.lse)
        answer = output[:count].cpu()
        self.check_cache(before, metadata.host.slot_mapping[:count])
        requests = [StepRequest(name, self.tokens_each, self.context(name)) for name in metadata.req_ids]
        self.trees = trees
        try:
            self.compare(answer, self.expected(fresh, requests), requests, fresh[0])
        finally:
            self.trees = {}
        self.keep({name: self._path(tree) for name, tree in trees.items()}, trees)
        self._reject_drafts({name: self.tokens_each for name in chosen if name not in trees})

    def _path(self, tree: list[int]) -> list[int]:
        """A path from the root, of any length."""
        path: list[int] = []
        while self.random.random() < 0.8:
            parent = path[-1] if path else -1
            children = [draft for draft, of in enumerate(tree) if of == parent]
            if not children:
                break
            path.append(int(self.random.choice(children)))
        return path


class CapturedLongTreeEngine(CapturedTreeEngine, CapturedLongEngine):
    """The same over rows of a few keys in one step and thousands in the next."""
