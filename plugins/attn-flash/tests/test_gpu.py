"""On a GPU, with the real libraries: what the kit has no test for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flash_gpu
import pytest
import torch

import attncore
from attncore.builder import CascadeRule, CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.errors import AttncoreError
from attncore.testing.engines.captured_engine import CapturedEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    *flash_gpu.COMPILES,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]
BLOCK = 256


@pytest.fixture(scope="module", params=["2", "3", "4"])
def backend(request: pytest.FixtureRequest) -> Any:
    try:
        choice = attncore.select(
            num_heads=8, num_kv_heads=2, head_size=64, dtype="bfloat16", backend="flash", block_size=BLOCK,
            options={"flash": {"generation": request.param}},
        )  # fmt: skip
    except AttncoreError as error:
        pytest.skip(f"generation {request.param} cannot be used here: {str(error).splitlines()[1].strip()}")
    return choice.create()


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2)]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_of_every_kind_wait_for_nothing(backend: Any) -> None:
    """Prompts, chunks, decodes and mixed steps, each twice, the second time under torch's check."""
    impl, cache = backend.impl("layers.0", scale=0.125), backend.allocate_kv_cache(64)
    batch = InputBatch(max_num_reqs=8, max_model_len=8 * BLOCK, block_size=BLOCK)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=4096)
    for index in range(4):
        batch.add_request(index, [1 + 4 * index + block for block in range(4)])
    for scheduled in ({0: 300, 1: 20, 2: 256, 3: 0}, {0: 1, 1: 1, 2: 1, 3: 0}, {0: 1, 1: 200, 2: 1, 3: 270}, {}):
        metadata = builder.build(scheduled)
        given = tensors(metadata.num_tokens)
        expected = impl.forward(*given, cache, metadata)
        with no_synchronisation():
            found = impl.forward(*given, cache, metadata)
        torch.testing.assert_close(found, expected)
        assert not found.isnan().any()
    builder.close()


@pytest.mark.parametrize("tokens", [1, 3])
def test_captured_sizes_in_blocks_of_128(tokens: int) -> None:
    """Those that generation 4 prefers, and reads in another way than the kit's of 16: 1,000 batches that change."""
    try:
        choice = attncore.select(
            num_heads=4, num_kv_heads=2, head_size=64, dtype="bfloat16", backend="flash",
            options={"flash": {"generation": "4"}},
        )  # fmt: skip
    except AttncoreError as error:
        pytest.skip(f"generation 4 cannot be used here: {str(error).splitlines()[1].strip()}")
    assert choice.block_size == 128
    engine = CapturedEngine(choice.create(), tokens)
    for _ in range(1000):
        engine.change()
        engine.replayed()


def test_a_cascade_on_the_device(backend: Any) -> None:
    """Six requests share two blocks: what one pass gives; nothing synchronises."""
    impl, cache = backend.impl("layers.0", scale=0.125), backend.allocate_kv_cache(64)
    batch = InputBatch(max_num_reqs=8, max_model_len=8 * BLOCK, block_size=BLOCK)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=4096)
    batch.add_request(0, [1, 2, 3])
    impl.forward(*tensors(2 * BLOCK + 9), cache, builder.build({0: 2 * BLOCK + 9}))
    for index in range(1, 6):
        batch.add_request(index, [1, 2, 3 + index], num_computed_tokens=2 * BLOCK)
    metadata = builder.build({0: 1, **{index: index for index in range(1, 6)}})
    given = tensors(metadata.num_tokens)
    expected = impl.forward(*given, cache, metadata)
    rule = CascadeRule(min_requests=2)
    cascade = backend.cascade(metadata, rule)
    impl.forward_cascade(*given, cache, metadata, cascade)
    with no_synchronisation():
        cascade = backend.cascade(metadata, rule)
        found = impl.forward_cascade(*given, cache, metadata, cascade)
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)
    before = cache.clone()
    found = impl.forward_cascade(given[0], None, None, cache, metadata, cascade, write=False)
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)
    assert torch.equal(cache, before)
    builder.close()


def test_a_step_moved_on_gives_what_a_build_gives(backend: Any) -> None:
    impl = backend.impl("layers.0", scale=0.125)
    caches = [backend.allocate_kv_cache(16) for _ in range(2)]
    contexts, tables = [BLOCK - 3, 40], [[1, 3], [2]]
    for cache in caches:
        cache.normal_(generator=torch.Generator("cuda").manual_seed(1))
    builder = CommonMetadataBuilder(BLOCK, "flash", backend=backend)

    def built(step: int) -> Any:
        return builder.build([SequenceGroup(False, [Sequence(i, 1, contexts[i] + step, tables[i])]) for i in range(2)])

    moved = built(0)
    for step in range(6):
        if step:
            moved.advance_step()
        given = tensors(2)
        outputs = [impl.forward(*given, caches[0], moved), impl.forward(*given, caches[1], built(step))]
        torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*caches)
