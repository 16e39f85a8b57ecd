"""Latent caches by FlashAttention 3 on a CUDA device: what the kit's defaults leave out."""

from __future__ import annotations

import math
from typing import Any

import flash_gpu
import pytest
import torch
from attn_flash.spec import LATENT_WORKSPACE

from attncore.builder import CascadeRule, InputBatch, MetadataBuilder
from attncore.testing.engines.engine import Engine
from attncore.testing.engines.run_batches import run_batch
from attncore.testing.harness.subject import Subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LONG = [(0, 70), (300, 1), (17, 1), (16, 5), (900, 1), (0, 1), (511, 40), (4001, 1)]
NOTHING: Any = None


@pytest.fixture(scope="module")
def subject() -> Subject:
    return flash_gpu.subject("3_vllm", use_mla=True)


def made(subject: Subject, heads: int, block_size: int = 64) -> Any:
    return subject.backend(num_heads=heads, block_size=block_size, dtype="bfloat16")


@pytest.mark.parametrize(("heads", "block_size"), [(1, 1), (20, 64), (48, 16), (128, 64), (192, 64)])
def test_long_contexts_in_mixed_batches(subject: Subject, heads: int, block_size: int) -> None:
    """Head counts that fill no tile, too."""
    blocks = 2 * sum(-(-(context + tokens) // block_size) for context, tokens in LONG) + 8
    engine = Engine(made(subject, heads, block_size), num_blocks=blocks, junk=math.nan, with_lse=True)
    run_batch(engine, LONG)
    for name in (1, 2, 7):
        engine.grow(name, 3)
    engine.step({1: 3, 2: 3, 7: 3})


def decodes(backend: Any, count: int, context: int) -> tuple[Any, Any]:
    """The cache, and the metadata of a step of so many requests, which share all blocks but their last."""
    batch = InputBatch(max_num_reqs=count, max_model_len=context + 64, block_size=64)
    shared = list(range(1, context // 64 + 1))
    for name in range(count):
        batch.add_request(name, [*shared, len(shared) + 1 + name], context)
    cache = backend.allocate_kv_cache(len(shared) + count + 1)
    cache.normal_()
    return cache, MetadataBuilder(batch, backend, max_num_batched_tokens=count).build()


def test_a_shared_prefix_that_is_read_once(subject: Subject) -> None:
    backend = made(subject, 16)
    impl = backend.impl("layers.0", scale=0.05)
    cache, metadata = decodes(backend, 12, 1024)
    query, rows = (torch.randn(12, heads, 576, device="cuda").bfloat16() for heads in (16, 1))
    expected = impl.forward(query, rows, NOTHING, cache, metadata)
    cascade = backend.cascade(metadata, CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0))
    assert cascade is not None
    found = impl.forward_cascade(query, rows, NOTHING, cache, metadata, cascade)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_partial_outputs_stay_within_the_workspace(subject: Subject) -> None:
    """256 decodes of 128 heads: the library alone would take 4 GiB."""
    backend = made(subject, 128)
    impl = backend.impl("layers.0", scale=0.05)
    cache, metadata = decodes(backend, 256, 8192)
    query, rows = (torch.randn(256, heads, 576, device="cuda").bfloat16() for heads in (128, 1))
    impl.forward(query, rows, NOTHING, cache, metadata)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    impl.forward(query, rows, NOTHING, cache, metadata)
    results = 256 * 128 * (512 * 2 + 4)
    assert torch.cuda.max_memory_allocated() - before <= LATENT_WORKSPACE + results + (16 << 20)
