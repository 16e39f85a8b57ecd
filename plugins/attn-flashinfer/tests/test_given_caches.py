"""Caches that an engine hands over, and layers that attend without writing, over the stand-in of the library."""

from __future__ import annotations

from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from attncore.builder import InputBatch, MetadataBuilder
from attncore.dense import dense_attention
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


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["whole", "pair", "latent"])
def test_a_cache_that_is_given_other_memory(form: str, layout: str) -> None:
    """The same tensor, whose memory an engine has exchanged: its views of before show the old one."""
    torch.manual_seed(0)
    latent = form == "latent"
    backend = standin.latent_backend() if latent else standin.backend(kv_cache_layout=layout)
    heads, size, config = 1 if latent else 2, backend.config.head_size, backend.config
    impl, cache = backend.impl("layers.0", scale=0.05), backend.allocate_kv_cache(4)
    given = tuple(part.clone() for part in backend.kv_cache_views(cache)) if form == "pair" else cache
    batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8)
    batch.add_request("a", [1])
    keys, values = [], []
    for step in range(4):
        if step == 2:
            for part in given if form == "pair" else (given,):
                before = part.data
                part.data = before.clone()
                before.fill_(7.0)
        query, key, value = (torch.randn(1, count, size).bfloat16() for count in (4, heads, heads))
        found = impl.forward(query, key, value, given, builder.build())
        keys.append(key.float())
        values.append(key[..., : config.head_size_v].float() if latent else value.float())
        expected = dense_attention(query.float(), torch.cat(keys), torch.cat(values), scale=0.05)
        torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)
