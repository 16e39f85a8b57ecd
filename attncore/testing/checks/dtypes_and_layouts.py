"""Dtypes of the model, dtypes and layouts of the cache: tested where the spec declares them."""

from __future__ import annotations

import pytest
import torch

from attncore.testing.engines.engine import Engine
from attncore.testing.engines.random_tensors import FP8
from attncore.testing.engines.run_batches import run_around_a_block
from attncore.testing.engines.steps_on_device import planned
from attncore.testing.harness.covers import covers
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_dtype",
    "test_kv_cache_dtype",
    "test_kv_cache_layout",
    "test_numbers_beyond_an_fp8_cache",
]
BEYOND = {"fp8_e4m3": 600.0, "fp8_e5m2": 65000.0}
"""Numbers that each dtype of a cache does not hold, and float16 does."""


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


@covers("cache {kv_cache_dtype}")
@pytest.mark.parametrize("method", ["forward", "write_cache"])
@pytest.mark.parametrize("kv_cache_dtype", sorted(BEYOND))
def test_numbers_beyond_an_fp8_cache(attncore_subject: Subject, kv_cache_dtype: str, method: str) -> None:
    """A key and a value larger than the cache holds are cut off at its largest number: a conversion alone may make them
    infinite or NaN, which every later query of the request would read."""
    if kv_cache_dtype not in attncore_subject.form.kv_cache_dtypes:
        raise UnsupportedError("its spec does not declare it")
    backend = attncore_subject.backend(kv_cache_dtype=kv_cache_dtype)
    engine = Engine(backend)
    engine.add("a", 1)
    metadata = planned(backend, engine.builder.build(engine.scheduled({"a": 1})))
    slot = int(metadata.host.slot_mapping[0])
    query, key, value = engine.on_device(engine.drawn.query_key_value(1))
    beyond = BEYOND[kv_cache_dtype]
    key.fill_(beyond)
    value.fill_(-beyond)
    if method == "forward":
        engine.forward((query, key, value), metadata)
    else:
        engine.impl.write_cache(key, None if backend.config.use_mla else value, engine.kv_cache, metadata)
    views = backend.kv_cache_views(engine.kv_cache)
    for name, view, sign in zip(("key", "value"), views, (1, 1 if backend.config.use_mla else -1), strict=True):
        held = view[slot // engine.block_size, slot % engine.block_size].cpu()
        held = held if held.dtype.is_floating_point else held.view(FP8[kv_cache_dtype])
        largest = sign * torch.finfo(held.dtype).max
        if not bool((held.float() == largest).all()):
            raise ConformanceError(
                f"{method} wrote {float(held.float().flatten()[0]):g} to the {kv_cache_dtype} cache for a {name} of "
                f"{sign * beyond:g}, which is beyond its range; cut off at its largest number, {largest:g}, as "
                "attncore.CacheWriter does"
            )


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
