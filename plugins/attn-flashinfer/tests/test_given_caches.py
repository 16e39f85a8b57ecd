"""Caches that an engine hands over, and layers that attend without writing, over the stand-in of the library."""

from __future__ import annotations

from typing import Any

import flashinfer_standin as standin
import pytest

from attncore.testing.engines.engine import Engine
from attncore.testing.engines.given_caches import FORMS, as_bytes, pair_of_views
from attncore.testing.engines.reading_engine import WRITERS, ReadingEngine
from attncore.testing.engines.run_batches import run_batch, run_with_a_copied_block

REQUESTS = [(0, 9), (3, 3), (4, 1), (13, 1)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", FORMS)
def test_a_pair_of_views(form: str, layout: str) -> None:
    for options in ({}, {"decode": "xqa"}):
        backend = standin.backend(kv_cache_layout=layout, block_size=16, options=options)
        run_batch(Engine(backend, cache=pair_of_views(form)), REQUESTS)
        run_with_a_copied_block(backend, cache=pair_of_views(form))


@pytest.mark.parametrize("cache", [as_bytes, pair_of_views("key and value in one row", bytes_only=True)])
def test_an_fp8_cache_as_bytes(cache: Any) -> None:
    run_batch(Engine(standin.backend(kv_cache_dtype="fp8_e4m3"), cache=cache), REQUESTS)


@pytest.mark.parametrize("written_by", WRITERS)
def test_a_layer_attends_without_writing(written_by: str) -> None:
    for features in ({}, {"sliding_window": 3}):
        run_batch(ReadingEngine(standin.backend(), written_by=written_by, with_lse=True, **features), REQUESTS)
