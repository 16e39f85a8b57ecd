"""What one step may leave for the next: nothing."""

from __future__ import annotations

import numpy as np
import pytest

from attncore.testing.engines.blocks_first import tensors_of
from attncore.testing.engines.builder_engine import BuilderEngine
from attncore.testing.engines.cache_view import CacheView
from attncore.testing.engines.compare import differs
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_a_cache_that_is_given_other_memory",
    "test_a_layer_that_is_given_another_cache",
    "test_a_smaller_batch_after_a_larger_one",
    "test_shorter_requests_after_longer_ones",
    "test_steps_of_a_builder_that_uses_its_metadata_again",
    "test_the_same_step_twice_gives_the_same",
    "test_two_instances_side_by_side",
]


@covers("state")
def test_a_smaller_batch_after_a_larger_one(attncore_subject: Subject) -> None:
    """Nothing of a step of many requests is left over in a step of few, of one, and of many again."""
    engine = Engine(attncore_subject.backend())
    size = engine.block_size
    for name in range(6):
        engine.add(name, 2 * size + 8)
    engine.fill({name: size + name % 3 for name in range(6)})
    if "decode" in engine.phases:
        for names in ((0, 1, 2, 3, 4, 5), (1, 4), (2,), (0, 1, 2, 3, 4), (5,)):
            engine.step(dict.fromkeys(names, 1))
    else:
        for some in ((1, 4), (2,), (0, 3, 5)):
            engine.step(dict.fromkeys(some, 2))


@covers("state")
def test_shorter_requests_after_longer_ones(attncore_subject: Subject) -> None:
    """The same layer, the same cache: a long request leaves, short ones take its blocks."""
    engine = Engine(attncore_subject.backend())
    size = engine.block_size
    engine.add("long", 6 * size)
    engine.fill({"long": 6 * size - 1})
    engine.step({"long": 1})
    engine.free = []  # the next must take the blocks that are given back
    engine.remove("long")
    for name, length in (("a", 2), ("b", size + 1)):
        engine.add(name, length)
    engine.fill({"a": 1, "b": size})
    engine.step({"a": 1, "b": 1} if "decode" in engine.phases else {"a": 1})


@covers("state")
def test_the_same_step_twice_gives_the_same(attncore_subject: Subject) -> None:
    """Two engines with the same requests, one after another, get the same numbers."""
    backend = attncore_subject.backend()
    batch = [(0, 3), (backend.config.block_size, 1)] if len(attncore_subject.form.phases) > 1 else [(0, 1)]
    outputs = [run_batch(Engine(backend, seed=7), batch) for _ in range(2)]
    if differs(*outputs) > Engine(backend).tolerance:
        raise ConformanceError("the same step gave other numbers the second time: something of the first was left over")


@covers("state")
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_of_a_builder_that_uses_its_metadata_again(attncore_subject: Subject, depth: int) -> None:
    """A step's metadata lives for ``depth`` steps: what a backend keeps by the object belongs to ``metadata.kept``."""
    engine = BuilderEngine(attncore_subject.backend(), depth=depth)
    size = engine.block_size
    for name in range(4):
        engine.add(name, 3 * size + 8)
    engine.fill({name: 2 * size + name for name in range(4)})
    decodes = "decode" in engine.phases
    for names in ((0, 1, 2, 3), (0, 2), (3, 1, 0), (1,), (0, 1, 2, 3)):
        engine.step(dict.fromkeys(names, 1 if decodes else 2))
    engine.remove(0)
    engine.add("new", size + 3)
    if len(engine.phases) > 1:
        engine.step({"new": size + 1, 2: 1, 3: 1})
        engine.step({"new": 1, 1: 2})


def _under_way(subject: Subject) -> tuple[Engine, dict[str, int]]:
    """An engine whose request has run a step behind a block, and the step that it runs next."""
    engine = Engine(subject.backend())
    engine.add("a", engine.block_size + 8)
    engine.fill({"a": engine.block_size + 1})
    tokens = {"a": 1 if "decode" in engine.phases else 2}
    engine.step(tokens)
    return engine, tokens


@covers("state")
def test_a_layer_that_is_given_another_cache(attncore_subject: Subject) -> None:
    """The cache is an argument of each call: an engine that moves it to other memory hands over the new one."""
    engine, tokens = _under_way(attncore_subject)
    old, held = engine.cache_view, engine.kv_cache  # which stays alive: its memory is not taken for the new one
    engine.kv_cache = engine.backend.allocate_kv_cache(engine.num_blocks)
    engine.cache_view = CacheView(engine.backend, engine.kv_cache, engine.num_blocks)
    engine.cache_view.restore(old.snapshot())
    old.fill(np.ones_like(engine.written), engine.junk)
    engine.step(tokens)
    engine.step(tokens)
    del held


@covers("state")
def test_a_cache_that_is_given_other_memory(attncore_subject: Subject) -> None:
    """The same tensors, whose memory the engine has exchanged: views that a layer has kept of them show the old one."""
    engine, tokens = _under_way(attncore_subject)
    old, moved = engine.cache_view, engine.backend.allocate_kv_cache(engine.num_blocks)  # the view keeps the old memory
    for part, new in zip(tensors_of(engine.kv_cache), tensors_of(moved), strict=True):
        part.data = new.copy_(part)
    engine.cache_view = CacheView(engine.backend, engine.kv_cache, engine.num_blocks, old.owners)
    old.fill(np.ones_like(engine.written), engine.junk)
    engine.step(tokens)
    engine.step(tokens)


@covers("state")
def test_two_instances_side_by_side(attncore_subject: Subject) -> None:
    """Two backends of one plugin in a process, as two models have them: their steps alternate."""
    heads = ((4, 2), (2, 2))
    engines = [
        Engine(attncore_subject.another(num_heads=queries, num_kv_heads=keys), seed=queries) for queries, keys in heads
    ]
    for engine in engines:
        engine.add("a", 2 * engine.block_size + 8)
        engine.add("b", max(engine.block_size, 4))
    tokens = 1 if "decode" in engines[0].phases else 2
    for engine in engines:
        engine.fill({"a": engine.block_size + 1})
    for scheduled in ({"a": tokens}, {"a": tokens, "b": tokens}, {"b": tokens}):
        for engine in engines:
            engine.step(scheduled)
