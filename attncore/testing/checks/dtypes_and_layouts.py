"""Dtypes of the model, dtypes, scales and layouts of the cache: tested where the spec declares them."""

from __future__ import annotations

from typing import Any

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
    "test_scales_of_an_fp8_cache",
]
LARGE_SCALE = 1024.0


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


@covers("kv_scales")
@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_scales_of_an_fp8_cache(attncore_subject: Subject, argument: str) -> None:
    """``k_scale`` and ``v_scale`` multiply what an fp8 cache holds."""
    attncore_subject.require("kv_scales")
    dtypes = sorted(name for name in attncore_subject.form.kv_cache_dtypes if name.startswith("fp8"))
    if not dtypes:
        raise UnsupportedError("its spec declares no fp8 cache")
    backend = attncore_subject.backend(kv_cache_dtype=dtypes[0])
    # Without it keys or values are beyond what e4m3 holds: a small one, ignored both ways, would not show.
    features: dict[str, Any] = {argument: LARGE_SCALE}
    if argument == "k_scale":
        features["scale"] = backend.config.head_size**-0.5 / LARGE_SCALE
    run_around_a_block(attncore_subject, backend, **features)


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
