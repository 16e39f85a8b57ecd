"""Draft trees, where the spec declares `tree_mask`: what each token sees, and the path that is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from attncore.testing.engines.engine import NUM_BLOCKS
from attncore.testing.engines.reading_engine import METHODS, ReadingEngine, by_method
from attncore.testing.engines.tree_engine import MOST_TOKENS, TreeEngine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES, own_scale
from attncore.testing.harness.draw_batches import explore
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_kept_path_is_decoded_from",
    "test_draft_trees_by_another_method",
    "test_draft_trees_of_any_shape",
    "test_draft_trees_over_random_batches",
    "test_draft_trees_with_a_feature",
]

SHAPES = {
    "siblings": [-1] * 6,
    "chain": [-1, 0, 1, 2, 3],
    "two chains": [-1, -1, 0, 1, 2, 3],
    "comb": [-1, -1, 1, 1, 3, 3, 5],
    "binary": [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5],
    "last bit": [*[-1] * (MOST_TOKENS - 3), MOST_TOKENS - 4, MOST_TOKENS - 3],
    "largest chain": [*range(-1, MOST_TOKENS - 2)],
}
DEEP = [-1, 0, -1, 1, 3, 2, 4, 6, 5, 7, 9]
"""Two long branches that take turns, so that tokens lie further apart than they are deep."""

LONG = 600  # keys: more than a kernel reads in one part


class ReadingTreeEngine(ReadingEngine, TreeEngine):
    """Trees of a layer that attends without writing."""


@covers("tree_mask")
def test_draft_trees_over_random_batches(attncore_subject: Subject, attncore_examples: int) -> None:
    """Trees of any shape beside decodes and prompts, over contexts of any length, in steps that are padded too. The
    scale is the layer's."""
    attncore_subject.require("tree_mask")
    backend = attncore_subject.backend()
    scale = own_scale(backend)

    def check(seed: int) -> None:
        random, engine = np.random.default_rng(seed), TreeEngine(backend, seed=seed, scale=scale)
        contexts: dict[Any, int] = {}
        trees: dict[Any, list[int]] = {}
        for name in range(int(random.integers(1, 5))):
            contexts[name] = int(random.integers(0 if "prefill" in engine.phases else 1, 3 * engine.block_size))
            drafts = int(random.integers(0, 12))
            trees[name] = [int(random.integers(-1, draft)) if draft else -1 for draft in range(drafts)]
            engine.add(name, contexts[name] + drafts + 1)
        prompt = 5 if random.integers(0, 2) else MOST_TOKENS + 6  # a decode, as a tree is, or more than one may run
        others = {"one": 1, "prompt": prompt} if "prefill" in engine.phases else {"one": 1}
        for other, tokens in others.items():
            contexts[other] = 3
            engine.add(other, 3 + tokens)
        engine.fill(contexts)
        engine.tree_step(others, trees, pad_tokens=int(random.integers(0, 2)))

    explore(check, attncore_examples, seed=st.integers(0, 9999))


@covers("tree_mask")
@pytest.mark.parametrize("shape", SHAPES)
def test_draft_trees_of_any_shape(attncore_subject: Subject, shape: str) -> None:
    """Siblings alone, chains, branches, and as many tokens as a mask has bits."""
    attncore_subject.require("tree_mask")
    backend = attncore_subject.backend()
    tree, size = SHAPES[shape], backend.config.block_size
    contexts = {"a": 1, "b": size, "c": size + 3}
    engine = TreeEngine(backend, num_blocks=2 + sum(2 + (context + len(tree)) // size for context in contexts.values()))
    for name, context in contexts.items():
        engine.add(name, context + len(tree) + 1)
    engine.fill(contexts)
    engine.tree_step({}, dict.fromkeys(contexts, tree))


@covers("tree_mask")
@pytest.mark.parametrize("method", METHODS)
def test_draft_trees_by_another_method(attncore_subject: Subject, method: str) -> None:
    """The trees' keys are in the cache already, or the log-sum-exp is asked for, too."""
    attncore_subject.require("tree_mask")
    engine = by_method(attncore_subject, method, TreeEngine, ReadingTreeEngine)
    contexts = {"a": 1, "b": 4, "c": engine.block_size + 3}
    for name, context in contexts.items():
        engine.add(name, context + len(DEEP) + 1)
    engine.fill(contexts)
    engine.tree_step({}, dict.fromkeys(contexts, DEEP))


@covers("tree_mask")
@pytest.mark.parametrize("feature", FEATURES)
def test_draft_trees_with_a_feature(attncore_subject: Subject, feature: str) -> None:
    """Windows and slopes go by positions, which are those of depth: a key is as far away as it lies up the path."""
    attncore_subject.require("tree_mask")
    attncore_subject.require(feature)
    backend = attncore_subject.backend()
    engine = TreeEngine(backend, **FEATURES[feature])
    contexts = {"a": 1, "b": 4, "c": engine.block_size + 3}
    for name, context in contexts.items():
        engine.add(name, context + len(DEEP) + 1)
    engine.fill(contexts)
    engine.tree_step({}, dict.fromkeys(contexts, DEEP))


@covers("tree_mask")
def test_a_kept_path_is_decoded_from(attncore_subject: Subject) -> None:
    """``move_slots`` moves what is kept of a tree to where a chain would be, and decodes go on from there; behind 600
    keys, too."""
    attncore_subject.require("tree_mask")
    if "decode" not in attncore_subject.form.phases:
        raise UnsupportedError("its spec declares no phase decode")
    backend = attncore_subject.backend()
    size = backend.config.block_size
    engine = TreeEngine(backend, num_blocks=NUM_BLOCKS + (LONG + 16 * len(DEEP)) // size)
    contexts = {"a": 1, "b": size, "c": size + 3, "long": LONG}
    for name, context in contexts.items():
        engine.add(name, context + 4 * len(DEEP))
    engine.fill(contexts)
    for kept in (
        {"a": [2, 5, 8], "b": [0, 1, 3, 4], "c": [], "long": [0, 1]},
        {"a": [2], "b": [2, 5], "c": [0, 1, 3], "long": [2, 5]},
    ):
        trees = dict.fromkeys(contexts, DEEP)
        engine.tree_step({}, trees)
        engine.keep(kept, trees)
        engine.step(dict.fromkeys(contexts, 1))
    engine.tree_step({"a": 1}, {"b": DEEP, "long": DEEP})
