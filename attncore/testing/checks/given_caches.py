"""Caches that an engine hands over: a pair of strided views into its own pool, where declared; fp8 as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from attncore.testing.engines.blocks_first import tensors_of
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.given_caches import FORMS, MakeCache, as_bytes, pair_of_views
from attncore.testing.engines.run_batches import run_around_a_block, run_with_a_copied_block
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import named
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend

__all__ = [
    "test_a_pair_of_views",
    "test_an_fp8_cache_as_bytes",
    "test_blocks_of_a_pair_of_views_are_copied",
]
FP8 = ("fp8_e4m3", "fp8_e5m2")


@covers("strided_kv_cache")
@pytest.mark.parametrize("form", FORMS)
def test_a_pair_of_views(attncore_subject: Subject, form: str) -> None:
    """Keys and values as views of an engine's pool, whatever the strides; NaN beside them is neither read nor written.
    For every layout that is declared: it says nothing of a pair."""
    attncore_subject.require("strided_kv_cache")
    for layout in attncore_subject.form.kv_cache_layouts:
        backend = attncore_subject.backend(strided_kv_cache=True, kv_cache_layout=layout)
        with named(f"a pair of views ({form})", f"layout {layout}"):
            run_around_a_block(attncore_subject, backend, cache=pair_of_views(form))


@covers("strided_kv_cache")
@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_a_pair_of_views_are_copied(attncore_subject: Subject, form: str) -> None:
    """``copy_blocks`` of a pair, and ``swap_blocks`` between a pair and a cache of the backend's own, which may be
    refused where that holds more than the pair."""
    attncore_subject.require("strided_kv_cache")
    attncore_subject.require_phase("decode")
    backend = attncore_subject.another(strided_kv_cache=True)  # it allocates a cache smaller than other tests give
    run_with_a_copied_block(backend, cache=pair_of_views(form))
    engine = Engine(backend, cache=pair_of_views(form))
    engine.add("a", engine.block_size + 1)
    engine.fill({"a": engine.block_size})
    elsewhere, block = backend.allocate_kv_cache(3), engine.batch.block_ids("a")[0]
    try:
        backend.swap_blocks(engine.kv_cache, elsewhere, [(block, 1)])
    except ValueError as error:
        if not (str(error).startswith("dst_kv_cache") and _holds_more_than_views(backend, elsewhere)):
            raise
        return
    before = engine.cache_view.snapshot()
    for part in backend.kv_cache_views(engine.kv_cache):
        part[block] = 0
    backend.swap_blocks(elsewhere, engine.kv_cache, [(1, block)])
    if any(not new.equal(old) for new, old in zip(engine.cache_view.snapshot(), before, strict=True)):
        raise ConformanceError(f"a block of a pair of views ({form}), swapped out and in again, is another")
    engine.step({"a": 1})


def _holds_more_than_views(backend: AttentionBackend, kv_cache: Any) -> bool:
    parts = tensors_of(kv_cache), backend.kv_cache_views(kv_cache)
    held, shown = (sum(part.nbytes for part in some) for some in parts)
    return bool(held > shown)


@covers("cache {kv_cache_dtype}")
@pytest.mark.parametrize("kv_cache_dtype", FP8)
def test_an_fp8_cache_as_bytes(attncore_subject: Subject, kv_cache_dtype: str) -> None:
    """An fp8 cache that an engine has allocated as ``uint8``; a pair of such views too, where pairs are declared."""
    form = attncore_subject.form
    if kv_cache_dtype not in form.kv_cache_dtypes:
        raise UnsupportedError("its spec does not declare it")
    made: list[MakeCache] = [as_bytes]
    if "strided_kv_cache" in form.features:
        made.append(pair_of_views("key and value in one row", bytes_only=True))
    for cache in made:
        with named("an fp8 cache as uint8"):
            run_around_a_block(attncore_subject, attncore_subject.backend(kv_cache_dtype=kv_cache_dtype), cache=cache)
