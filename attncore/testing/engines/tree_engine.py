"""An engine whose steps hold draft trees, of which it keeps a path: what each token sees, checked one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attncore.builder import MetadataBuilder
from attncore.testing.engines.compare import StepRequest
from attncore.testing.engines.engine import MOST_LONGEST, Engine
from attncore.testing.engines.requests import History
from attncore.testing.engines.steps_on_device import padded, planned

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.builder import CommonAttentionMetadata

MOST_TOKENS = 64  # of a tree, its root included

Tree = Sequence[int]
"""Of each draft the index of its parent, an earlier draft; -1: the root."""


class TreeEngine(Engine):
    """An Engine with steps of trees, and with paths that are kept of them."""

    def __init__(self, backend: AttentionBackend, **given: Any) -> None:
        super().__init__(backend, **given)
        self.builder = MetadataBuilder(
            self.batch, max_num_batched_tokens=MOST_LONGEST * self.batch.max_model_len, decode_threshold=MOST_TOKENS,
            draft_trees=True,
        )  # fmt: skip
        self.trees: Mapping[Any, Tree] = {}  # of the step that runs, or ran last

    def tree_step(
        self, scheduled: Mapping[Any, int], trees: Mapping[Any, Tree], *, pad_reqs: int = 0, pad_tokens: int = 0
    ) -> None:
        """Run a step of ``scheduled`` and of requests with ``trees``, padded as for a graph where asked.

        ConformanceError unless each token sees its request's context, itself and its ancestors alone.
        """
        step = self.builder.build({**dict.fromkeys(set(self.batch.req_ids) - {*trees}, 0), **scheduled}, trees=trees)
        counts = {**scheduled, **{name: len(tree) + 1 for name, tree in trees.items()}}
        requests = [StepRequest(name, counts[name], self.context(name)) for name in step.req_ids]
        given: CommonAttentionMetadata = step
        if pad_reqs or pad_tokens:
            spec = self.config.spec
            pad_seq_len = 0 if spec is None else spec.pad_seq_len
            given = padded(step, step.num_reqs + pad_reqs, step.num_tokens + pad_tokens, pad_seq_len)
        self.trees = trees
        try:
            self.run_step(planned(self.backend, given), requests)
        finally:
            self.trees = {}

    def keep(self, paths: Mapping[Any, Sequence[int]], trees: Mapping[Any, Tree]) -> None:
        """Keep these drafts of the last step's ``trees``, and move their tokens together in the cache."""
        tokens = {name: [0, *(draft + 1 for draft in path)] for name, path in paths.items()}
        for name, kept in tokens.items():
            history, count = self.history[name], len(trees[name]) + 1
            first = len(history.keys) - count
            chosen = torch.tensor([*range(first), *(first + token for token in kept)])
            self.history[name] = History(history.keys[chosen], history.values[chosen])
            for position in range(first + len(kept), first + count):
                block = self.batch.block_ids(name)[position // self.block_size]
                self.written[block, position % self.block_size] = False
        self.backend.move_slots([self.kv_cache], self.builder.keep_paths(paths))

    def expected(
        self, tensors: tuple[Tensor, Tensor, Tensor], requests: Iterable[StepRequest]
    ) -> list[tuple[Tensor, Tensor]]:
        requests = list(requests)
        contexts = {one.name: self.history[one.name] for one in requests}
        found, start = super().expected(tensors, requests), 0
        for index, one in enumerate(requests):
            if one.name in self.trees:
                own = [tensor[start : start + one.tokens] for tensor in tensors]
                found[index] = self._of_paths(own, contexts[one.name], paths(self.trees[one.name]))
            start += one.tokens
        return found

    def mistakes(self, query: Tensor, one: StepRequest) -> Iterable[tuple[str, Tensor]] | None:
        if one.name not in self.trees:
            return None
        whole, context = self.history[one.name], self.history[one.name].first(one.context)
        own = [query, whole.keys[one.context :], whole.values[one.context :]]
        return ((words, self._of_paths(own, context, seen)[0]) for words, seen in _mistakes(self.trees[one.name]))

    def _of_paths(self, own: list[Tensor], context: History, seen: list[list[int]]) -> tuple[Tensor, Tensor]:
        """What each token gives over the context and those tokens of its step that it sees, in their order."""
        query, keys, values = own
        answers = [
            self.dense(query[token, None], *context.extended(keys[path], values[path]))
            for token, path in enumerate(seen)
        ]
        outputs, logarithms = zip(*answers, strict=True)
        return torch.cat(outputs), torch.cat(logarithms)


def paths(tree: Tree) -> list[list[int]]:
    """For each token of a tree, the root first, the tokens from the root to it: token i + 1 is draft i."""
    found = [[0]]
    for draft, parent in enumerate(tree):
        found.append([*found[parent + 1], draft + 1])
    return found


def _mistakes(tree: Tree) -> list[tuple[str, list[list[int]]]]:
    """Masks that are wrong: in words, and the tokens that each token then sees."""
    right = paths(tree)
    depths = [len(path) for path in right]
    every = range(len(right))
    return [
        ("each token saw all before it, siblings too: tree_mask was not read", [list(range(i + 1)) for i in every]),
        (
            "each token saw those of lesser depth, not its ancestors alone",
            [[j for j in every if depths[j] < depths[i] or j == i] for i in every],
        ),
        (
            "siblings saw each other",
            [sorted({*right[i], *(j for j in every[1:] if i and tree[j - 1] == tree[i - 1])}) for i in every],
        ),
        ("no token saw its ancestors in the tree", [[i] for i in every]),
        ("the root were hidden", [[j for j in path if j] or [0] for path in right]),
    ]
