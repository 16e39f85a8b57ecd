"""Runs batches through an engine: one, one at the edges of blocks, or many that are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.testing.engines.compare import differs
from attncore.testing.engines.engine import Engine
from attncore.testing.harness.errors import ConformanceError, UnsupportedError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend
    from attncore.testing.harness.subject import Subject


def engine_on_gpu(subject: Subject, otherwise: str) -> Engine:
    """An engine whose backend runs on a CUDA or ROCm device; UnsupportedError elsewhere, where ``otherwise``."""
    engine = Engine(subject.backend())
    if torch.device(engine.config.device).type != "cuda":
        raise UnsupportedError(f"the backend runs on {engine.config.device}, where {otherwise}")
    return engine


def run_batch(engine: Engine, batch: Iterable[tuple[int, int]]) -> Tensor:
    """The output of a step of requests of (context, tokens), whose contexts are computed in steps before it.

    The requests are named 0, 1, and so on.
    """
    pairs = list(batch)
    for name, (context, count) in enumerate(pairs):
        engine.add(name, context + count)
    engine.fill({name: context for name, (context, _) in enumerate(pairs)})
    return engine.step({name: count for name, (_, count) in enumerate(pairs)})


def run_around_a_block(
    subject: Subject, backend: AttentionBackend, *, make: Callable[..., Engine] = Engine, **given: Any
) -> Tensor:
    """The output of requests at the edges of blocks, of an Engine that is made with ``given``; then they all decode."""
    engine = make(backend, **given)
    output = run_batch(engine, subject.around_a_block(backend.config.block_size))
    run_decodes_alone(engine)
    return output


def run_decodes_alone(engine: Engine) -> None:
    """A token of each request in a step without prompts, which libraries run by another kernel than a mixed step."""
    if len(engine.phases) == 1:
        return
    for name in engine.batch.req_ids:
        engine.grow(name)
    engine.step(dict.fromkeys(engine.batch.req_ids, 1))


def run_drawn_batches(subject: Subject, backend: AttentionBackend, examples: int, **given: Any) -> None:
    """Run ``examples`` batches that are drawn, of the phases that the backend has, each in an Engine of its own."""
    # Here, so that `attncore verify`, which draws nothing, does not need Hypothesis.
    from hypothesis import strategies as st

    from attncore.testing.harness.draw_batches import batches, explore

    def check(batch: list[tuple[int, int]], seed: int) -> None:
        run_batch(Engine(backend, seed=seed, **given), batch)

    drawn = batches(backend.config.block_size, **subject.drawn_phases)
    explore(check, examples, batch=drawn, seed=st.integers(0, 999))


def _check_copy(engine: Engine, old: int, new: int) -> None:
    """ConformanceError where the block ``new`` does not hold what ``old`` does, as far as views show it."""
    try:
        views = engine.backend.kv_cache_views(engine.kv_cache)
    except ValueError:  # a cache without views: what a request reads of it tells
        return
    for name, view in zip(("keys", "values"), views, strict=True):
        if differs(view[new].float().cpu(), view[old].float().cpu()):
            raise ConformanceError(f"copy_blocks left other {name} in block {new} than block {old} has, its source")


def run_with_a_copied_block(backend: AttentionBackend, **given: Any) -> None:
    """A request of an Engine made with ``given``, whose first block was copied and replaced by the copy, decodes on."""
    engine = Engine(backend, **given)
    engine.add("a", engine.block_size + 2)
    engine.fill({"a": engine.block_size + 1})
    old, new = engine.batch.block_ids("a")[0], engine.free.pop()
    backend.copy_blocks([engine.kv_cache], np.array([(old, new)]))
    _check_copy(engine, old, new)
    engine.replace_block("a", 0, new)
    engine.step({"a": 1})
