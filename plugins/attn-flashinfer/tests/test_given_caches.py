"""Caches that an engine hands over, and layers that attend without writing, over the stand-in of the library."""

from __future__ import annotations

from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from attncore import CacheWriter
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


def decode_step(backend: Any) -> tuple[Any, list[torch.Tensor]]:
    """A step of the sixth token of a request in block 1, and its tensors."""
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=16)
    batch.add_request("a", [1], 5)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=8).build()
    return metadata, [torch.randn(1, heads, 64).bfloat16() for heads in (4, 2, 2)]


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("then", [0, 1])
def test_a_layer_that_was_interrupted_while_it_took_a_cache(monkeypatch: pytest.MonkeyPatch, then: int) -> None:
    """It writes to the cache that it is given next, and reads that."""
    backend = standin.backend(block_size=16)
    impl, another = (backend.impl(f"layers.{index}", scale=0.05) for index in range(2))
    (metadata, given), caches = decode_step(backend), [backend.allocate_kv_cache(4) for _ in range(2)]
    for cache in caches:
        for view in backend.kv_cache_views(cache):
            view.normal_()
    impl.forward(*given, caches[0], metadata)
    with monkeypatch.context() as patched:
        patched.setattr(CacheWriter, "into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            impl.forward(*given, caches[1], metadata)
    expected = another.forward(*given, caches[then].clone(), metadata)
    assert torch.equal(impl.forward(*given, caches[then], metadata), expected)
    assert torch.equal(backend.kv_cache_views(caches[then])[0][1, 5], given[1][0])


@pytest.mark.parametrize("kind", [list, type("Pair", (list,), {})])
def test_a_list_whose_tensors_are_exchanged(kind: Any) -> None:
    backend = standin.backend(block_size=16)
    impl, another = (backend.impl(f"layers.{index}", scale=0.05) for index in range(2))
    metadata, new = decode_step(backend)
    given = kind(backend.kv_cache_views(backend.allocate_kv_cache(4)))
    for step in range(3):
        given[:] = [part.clone() for part in given]  # in place, as an engine that exchanges them
        for part in given:
            part.normal_()
        expected = another.forward(*new, tuple(part.clone() for part in given), metadata)
        assert torch.equal(impl.forward(*new, given, metadata), expected), step
