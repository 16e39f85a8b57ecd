"""Metadata of the list builder (groups of sequences): plain prompts without a table, capped windows, profiling runs.

A backend that cannot read it says so by a ValueError that begins with ``metadata``, and is shown as unsupported.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from attncore.testing.engines.engine import Engine
from attncore.testing.harness.covers import covers
from attncore.testing.harness.declared_samples import FEATURES, TOGETHER, of_a_feature, own_scale
from attncore.testing.harness.draw_batches import explore, lengths
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_feature_of_the_list_builder",
    "test_a_profiling_run_of_the_list_builder",
    "test_a_windowed_step_of_the_list_builder",
    "test_plain_prompts_of_the_list_builder",
    "test_steps_of_the_list_builder",
]


@covers("list builder")
def test_plain_prompts_of_the_list_builder(attncore_subject: Subject) -> None:
    """Prompts alone: the block table has no columns, and attention is over this step's keys. The scale is the
    layer's."""
    attncore_subject.require_phase("prefill")
    backend = attncore_subject.backend()
    engine = Engine(backend, scale=own_scale(backend))
    prompts = {"a": 1, "b": engine.block_size, "c": 2 * engine.block_size + 1}
    for name, length in prompts.items():
        engine.add(name, length)
    engine.list_step(prompts, {})


@covers("list builder")
@pytest.mark.parametrize("kind", ["plain prompts", "chunked prefill", "prefix hits"])
def test_steps_of_the_list_builder(attncore_subject: Subject, attncore_examples: int, kind: str) -> None:
    """Prompts first, then decodes; prompts with context have the whole table."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    size = backend.config.block_size
    context = st.just(0) if kind == "plain prompts" else st.just(0) | lengths(size)

    def check(prompts: list[tuple[int, int]], decodes: list[int], seed: int) -> None:
        engine = Engine(backend, seed=seed)
        _mixed(engine, prompts, decodes, hit=kind == "prefix hits")

    strategies: dict[str, Any] = {
        "prompts": st.lists(st.tuples(context, lengths(size)), max_size=3),
        "decodes": st.lists(lengths(size), min_size=1, max_size=4),
        "seed": st.integers(0, 999),
    }
    explore(check, attncore_examples, **strategies)


@covers("list builder")
@pytest.mark.parametrize("window", [1, 5, 8])
def test_a_windowed_step_of_the_list_builder(attncore_subject: Subject, window: int) -> None:
    """Decodes have the last blocks of their table only, and a length capped to those; early prompt slots are -1."""
    attncore_subject.require("sliding_window")
    attncore_subject.require_phase("prefill", "decode")
    engine = Engine(attncore_subject.backend(), sliding_window=window)
    size = engine.block_size
    _mixed(engine, [(0, 2 * size + 3), (0, 1)], [1, size, 2 * size, 3 * size + 1], hit=False)


@covers("list builder")
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER])
def test_a_feature_of_the_list_builder(attncore_subject: Subject, feature: str) -> None:
    """Plain prompts, alone and beside decodes, and chunks, with each feature that is declared and with all of them, and
    a scale of the layer's own: kernels for the keys of a step are others than those for a cache."""
    attncore_subject.require_phase("prefill", "decode")
    backend = attncore_subject.backend()
    size, scale = backend.config.block_size, own_scale(backend)
    given = of_a_feature(feature, attncore_subject.form.features)
    for prompts, decodes in (
        ([(0, 1), (0, 2 * size + 3)], []),
        ([(0, size + 1)], [1, 2 * size, 3 * size + 1]),
        ([(size + 1, size + 2), (0, 3)], [size]),
    ):
        _mixed(Engine(backend, scale=scale, **given), prompts, decodes, hit=False)


@covers("list builder")
def test_a_profiling_run_of_the_list_builder(attncore_subject: Subject) -> None:
    """No table anywhere, every slot -1: it runs, and changes no block."""
    attncore_subject.require_phase("prefill")
    engine = Engine(attncore_subject.backend())
    for name, length in (("a", 3), ("b", engine.block_size + 1)):
        engine.add(name, length)
    engine.list_step({"a": 3, "b": engine.block_size + 1}, {}, profiling=True)


def _mixed(engine: Engine, prompts: list[tuple[int, int]], decodes: list[int], *, hit: bool) -> None:
    contexts = {f"prompt {i}": context for i, (context, _) in enumerate(prompts)}
    contexts |= {f"decode {i}": context for i, context in enumerate(decodes)}
    tokens = {f"prompt {i}": count for i, (_, count) in enumerate(prompts)}
    for name, context in contexts.items():
        engine.add(name, context + tokens.get(name, 1))
    engine.fill(contexts)
    engine.list_step(tokens, {name: 1 for name in contexts if name not in tokens}, hit=hit)
