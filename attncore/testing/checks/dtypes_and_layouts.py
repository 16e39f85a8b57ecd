"""Dtypes of the model, dtypes and layouts of the cache: tested where the spec declares them."""

from __future__ import annotations

import pytest

from attncore.testing.engines.run_batches import run_around_a_block
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_dtype",
    "test_kv_cache_dtype",
    "test_kv_cache_layout",
]


@covers("dtype {dtype}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(attncore_subject: Subject, dtype: str) -> None:
    """Query, key, value and output of each dtype that is declared."""
    if dtype not in attncore_subject.form.dtypes:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(dtype=dtype)
    run_around_a_block(attncore_subject, backend)


@covers("cache {kv_cache_dtype}")
@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_kv_cache_dtype(attncore_subject: Subject, attncore_examples: int, kv_cache_dtype: str) -> None:
    """A cache of each dtype that is declared."""
    if kv_cache_dtype not in attncore_subject.form.kv_cache_dtypes:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(kv_cache_dtype=kv_cache_dtype)
    run_around_a_block(attncore_subject, backend)


@covers("layout {layout}")
@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_kv_cache_layout(attncore_subject: Subject, layout: str) -> None:
    """A cache in each layout that is declared."""
    if layout not in attncore_subject.form.kv_cache_layouts:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(kv_cache_layout=layout)
    if backend.config.kv_cache_layout != layout:
        raise ConformanceError(f"asked for layout {layout}, the backend was made for {backend.config.kv_cache_layout}")
    run_around_a_block(attncore_subject, backend)
