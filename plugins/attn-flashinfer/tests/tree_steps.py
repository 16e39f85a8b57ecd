"""Eager steps with trees, and without, that tests run over the stand-in, FlashInfer's own Python, and a GPU."""

from __future__ import annotations

from attncore.testing.engines.tree_engine import TreeEngine

DEEP = [-1, 0, -1, 1, 3, 2, 4, 6, 5, 7, 9]
"""Two long branches that take turns, so that tokens lie further apart than they are deep."""


def run(engine: TreeEngine) -> None:
    """Trees beside decodes, drafts of chains and a prompt; then without any tree; then again."""
    contexts = {"a": 5, "b": engine.block_size, "c": 13, "one": 7, "chain": 9}
    for name in (*contexts, "prompt"):
        engine.add(name, 70)
    engine.fill(contexts)
    engine.tree_step({"one": 1, "chain": 3, "prompt": 5}, {"a": DEEP, "b": [-1] * 4, "c": []})
    engine.keep({"a": [2, 5, 8], "b": [3], "c": []}, {"a": DEEP, "b": [-1] * 4, "c": []})
    engine.tree_step({"one": 2, "chain": 1, "prompt": 3}, {})
    engine.tree_step({"one": 1}, {"a": [-1, -1, 0], "chain": [*range(-1, 6)]}, pad_reqs=2, pad_tokens=3)
