"""Latent caches (MLA), and values of a size of their own, where the spec declares them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from attncore.abstract import AttentionBackend
from attncore.testing.checks.features import edges
from attncore.testing.engines.cache_view import Pages
from attncore.testing.engines.engine import Engine, run_rows
from attncore.testing.harness.covers import covers, explore, rows
from attncore.testing.harness.errors import ConformanceError, UnsupportedError, told
from attncore.testing.harness.subject import Subject

__all__ = [
    "test_latent_attention_over_random_batches",
    "test_latent_attention_reads_only_its_own",
    "test_latent_blocks_are_copied",
    "test_sizes_of_a_value_head",
    "test_the_latent_cache_holds_a_row_a_token",
]
MOST = 256  # of a value head's sizes


def _latent(subject: Subject) -> AttentionBackend:
    if not subject.form.use_mla:
        raise UnsupportedError("its spec does not declare use_mla")
    return subject.backend(use_mla=True)


def _kinds(subject: Subject) -> dict[str, Any]:
    phases = subject.form.phases
    return {} if len(phases) > 1 else {"contexts": True, "decode": "decode" in phases}


@covers("latent attention")
def test_latent_attention_over_random_batches(attncore_subject: Subject, attncore_examples: int) -> None:
    """Mixed batches: every query head reads the one latent row of a token, values are its first columns."""
    backend = _latent(attncore_subject)

    def check(batch: list[tuple[int, int]], seed: int) -> None:
        run_rows(Engine(backend, seed=seed), batch)

    batch = rows(backend.config.block_size, **_kinds(attncore_subject))
    explore(check, attncore_examples, batch=batch, seed=st.integers(0, 999))


@covers("latent attention")
def test_latent_attention_reads_only_its_own(attncore_subject: Subject) -> None:
    """NaN in all that no token owns (unused rows of last pages too, unless the spec declares ``finite_tail``)."""
    backend = _latent(attncore_subject)
    run_rows(Engine(backend, junk=math.nan), attncore_subject.around_a_block(backend.config.block_size))


@covers("latent attention")
def test_the_latent_cache_holds_a_row_a_token(attncore_subject: Subject) -> None:
    """A token owns ``head_size`` elements and no more than alignment adds: no copy of keys, none of values."""
    backend = _latent(attncore_subject)
    pages, size = Pages(backend, backend.allocate_kv_cache(2), 2), backend.config.head_size
    elements = sum(int((owner == 0).sum()) for owner in pages.owner)
    if not size <= elements < 2 * size:
        raise ConformanceError(f"a token owns {elements} elements of its block; its latent row has {size}")


@covers("latent attention")
def test_latent_blocks_are_copied(attncore_subject: Subject) -> None:
    """A request whose block was copied and replaced goes on with the copy."""
    attncore_subject.require_phase("decode")
    engine = Engine(_latent(attncore_subject))
    engine.add("a", engine.block_size + 2)
    engine.fill({"a": engine.block_size + 1})
    old, new = engine.batch.block_ids("a")[0], engine.free.pop()
    engine.backend.copy_blocks([engine.kv_cache], np.array([(old, new)]))
    engine.replace("a", 0, new)
    engine.step({"a": 1})


@covers("value head size")
def test_sizes_of_a_value_head(attncore_subject: Subject) -> None:
    """Values of another size than keys, at the edges of what head_size_v declares."""
    form = attncore_subject.form
    if form.head_size_v is None:
        raise UnsupportedError("its spec says that it is the query's")
    if form.mla_only:
        raise UnsupportedError("it runs latent attention only, whose values are a part of the keys")
    base = attncore_subject.request().head_size
    refused, tried = [], 0
    for size in [size for size in edges(form.head_size_v, MOST) if size != base]:
        try:
            backend = attncore_subject.backend(head_size_v=size)
        except UnsupportedError as error:
            refused.append(f"head_size_v {size}: {error}")
            continue
        tried += 1
        try:
            run_rows(Engine(backend), attncore_subject.around_a_block(backend.config.block_size))
        except Exception as error:
            raise ConformanceError(f"the spec declares head_size_v {size}, but: {told(error)}") from error
    if not tried:
        raise UnsupportedError("; ".join(refused) or "its spec declares no size but the query's")
