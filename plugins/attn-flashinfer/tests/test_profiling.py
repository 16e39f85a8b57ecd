"""Profiling runs on the CPU, the stand-in in FlashInfer's place: right numbers, and the memory of a step."""

from __future__ import annotations

from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    new_tokens_metadata,
)
from attncore.dense import dense_attention

LENS = [3, 9, 1, 4]


def profiled(backend: Any, builder: str) -> Any:
    if builder == "lists":
        groups = [SequenceGroup(True, [Sequence(i, n, 0, None)]) for i, n in enumerate(LENS)]
        return CommonMetadataBuilder(4, "flashinfer", backend=backend).build(groups)
    batch = InputBatch(max_num_reqs=4, max_model_len=16, block_size=4)
    return MetadataBuilder(batch, backend, max_num_batched_tokens=32).build_profile(LENS)


def dense(query: Any, key: Any, value: Any, scale: float, window: int | None) -> Any:
    """Each request's queries over its own keys, in float32."""
    parts = []
    for q, k, v in zip(*(tensor.float().split(LENS) for tensor in (query, key, value)), strict=True):
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        at = torch.arange(len(q))
        seen = at[:, None] >= at[None, :]
        if window is not None:
            seen &= at[:, None] - at[None, :] < window
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


@pytest.mark.parametrize("builder", ["persistent", "lists"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_profiling_run_attends_over_its_own_keys(builder: str, layout: str, window: int | None) -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder, kv_cache_layout=layout)
    impls = [backend.impl(f"layers.{i}", scale=0.125, sliding_window=window) for i in range(2)]
    metadata = profiled(backend, builder)
    for impl in impls:
        query, key, value = (torch.randn(sum(LENS), heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        expected = dense(query, key, value, 0.125, window)
        found, output = impl.forward(query, key, value, None, metadata), torch.empty_like(query)
        torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
        assert impl.forward(query, key, value, None, metadata, output) is output
        torch.testing.assert_close(output, found)
    assert backend.workspace._buffer is not None  # the memory of split contexts, which a step takes too


@pytest.mark.parametrize("window", [3, 5])
def test_windowed_prompts_of_a_list_builder_without_a_window(window: int) -> None:
    """The way that gives right numbers: every token has a slot, and the kernel applies the layer's window."""
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=0.125, sliding_window=window)
    groups = [SequenceGroup(True, [Sequence(i, n, 0, [3 * i + 1, 3 * i + 2, 3 * i + 3])]) for i, n in enumerate(LENS)]
    metadata = CommonMetadataBuilder(4, "flashinfer", backend=backend).build(groups)
    query, key, value = (torch.randn(sum(LENS), heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    found = impl.forward(query, key, value, backend.allocate_kv_cache(16), metadata)
    torch.testing.assert_close(found.float(), dense(query, key, value, 0.125, window), atol=2e-2, rtol=2e-2)


def test_why_a_builder_with_a_window_cannot_serve_them() -> None:
    """Its tables may come round: blocks that the window has passed are used again within the prompt. The first query
    with a full window sees a key whose slot a later token of the same step takes, so that no cache holds both."""
    window, table = 8, [0, 1, 0]
    builders = [CommonMetadataBuilder(4, "flashinfer", sliding_window=one) for one in (window, None)]
    masked, whole = (
        one.build([SequenceGroup(True, [Sequence(0, 10, 0, table)])]).slot_mapping.tolist() for one in builders
    )
    assert masked == [-1, -1, 2, 3, 4, 5, 6, 7, 0, 1]
    seen_by_7 = whole[7 - window + 1 : 8]
    assert whole[8] == whole[0]
    assert whole[0] in seen_by_7


def test_a_step_after_a_profiling_run_is_planned_anew() -> None:
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=0.125)
    batch = InputBatch(max_num_reqs=4, max_model_len=16, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=32)
    batch.add_request("a", [1])
    step = builder.build({"a": 3})
    tensors = [torch.randn(sum(LENS), heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    impl.forward(*tensors, None, profiled(backend, "lists"))
    cache, (query, key, value) = backend.allocate_kv_cache(8), (tensor[:3] for tensor in tensors)
    with pytest.raises(ValueError, match="metadata: not of the step that was planned last"):
        impl.forward(query, key, value, cache, step)
    backend.plan(step)
    wanted = dense(*tensors, 0.125, None)[:3]
    torch.testing.assert_close(impl.forward(query, key, value, cache, step).float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("step", ["profiling run", "new tokens"])
def test_a_step_without_pages_attends_over_its_own_keys_beside_a_cache_too(
    step: str, cached: bool, write: bool
) -> None:
    """No row has a block table, so that the keys are those given, whether they are written or not."""
    torch.manual_seed(0)
    backend = standin.backend()
    impls = [backend.impl(f"layers.{i}", scale=0.125) for i in range(2)]
    cache = backend.allocate_kv_cache(20).fill_(7.0) if cached else None
    if step == "profiling run":
        metadata = profiled(backend, "persistent")
    else:
        batch = InputBatch(max_num_reqs=4, max_model_len=16, block_size=4)
        for row in range(len(LENS)):
            batch.add_request(row, list(range(1 + 4 * row, 5 + 4 * row)), num_computed_tokens=row + 1)
        built = MetadataBuilder(batch, backend, max_num_batched_tokens=32).build(dict(enumerate(LENS)))
        metadata = new_tokens_metadata(built.prefill_metadata)
    lens = metadata.host.query_lens.tolist()
    backend.plan(metadata)
    for impl in impls:
        query, key, value = (torch.randn(sum(lens), heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        found, lse = impl.forward_with_lse(query, key, value, cache, metadata, write=write)
        assert lse.isfinite().all()
        parts = (tensor.float().split(lens) for tensor in (query, key, value))
        for mine, *given in zip(found.split(lens), *parts, strict=True):
            torch.testing.assert_close(mine.float(), dense_attention(*given, scale=0.125), atol=2e-2, rtol=2e-2)
    assert cache is None or bool((cache == 7.0).all())


def test_a_step_of_requests_that_have_context_needs_the_cache() -> None:
    backend = standin.backend()
    impl = backend.impl("layers.0", scale=0.125)
    batch = InputBatch(max_num_reqs=1, max_model_len=16, block_size=4)
    batch.add_request("a", [1, 2], num_computed_tokens=3)
    metadata = MetadataBuilder(batch, backend, max_num_batched_tokens=32).build()
    with pytest.raises(ValueError, match=r"^kv_cache: None found; a step of requests that have"):
        impl.forward(*(torch.randn(1, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)), None, metadata)


@pytest.mark.parametrize("cached", [True, False])
def test_chunks_and_decodes_of_a_profiling_run_attend_over_their_own_keys(cached: bool) -> None:
    """Of the list builder: they have a context, of which no page is known."""
    torch.manual_seed(0)
    backend = standin.backend()
    impl, cache = backend.impl("layers.0", scale=0.125), backend.allocate_kv_cache(4) if cached else None
    builder = CommonMetadataBuilder(4, "flashinfer", backend=backend)
    groups = [SequenceGroup(True, [Sequence(0, 3, 0, None)]), SequenceGroup(False, [Sequence(1, 1, 5, None)])]
    query, key, value = (torch.randn(4, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    found = impl.forward(query, key, value, cache, builder.build(groups))
    for tokens in (slice(0, 3), slice(3, 4)):
        wanted = dense_attention(*(tensor[tokens].float() for tensor in (query, key, value)), scale=0.125)
        torch.testing.assert_close(found[tokens].float(), wanted, atol=2e-2, rtol=2e-2)
