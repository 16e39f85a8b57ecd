"""Steps that move on without a build, and steps whose shared prefix is read once: compared with dense attention."""

from __future__ import annotations

from typing import Any

import flash_standin as standin
import pytest
import torch

from attncore.builder import CascadeRule, CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.dense import dense_attention

RULE = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)


@pytest.fixture(params=["2", "4"])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    made: Any = standin.Generation2() if request.param == "2" else standin.Generation4()
    standin.install(monkeypatch, request.param, made)
    return str(request.param)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, heads, 16).bfloat16() for heads in (4, 2, 2)]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)


def test_advance_step_over_the_edge_of_a_block(generation: str) -> None:
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(16)
    lengths, tables = [size - 2, 3], [[1], [2]]
    said: list[list[torch.Tensor]] = [[], []]
    prompts = [SequenceGroup(True, [Sequence(i, lengths[i], 0, tables[i])]) for i in range(2)]
    query, key, value = tensors(sum(lengths))
    impl.forward(query, key, value, cache, CommonMetadataBuilder(size, backend=backend).build(prompts))
    start = 0
    for i, length in enumerate(lengths):
        said[i] = [part[start : start + length].float() for part in (key, value)]
        start += length
    decodes = [SequenceGroup(False, [Sequence(i, 1, lengths[i], tables[i])]) for i in range(2)]
    metadata = CommonMetadataBuilder(size, backend=backend).build(decodes)
    for step in range(5):
        if step:
            for i in range(2):
                if (lengths[i] + step) % size == 0:
                    tables[i].append(3 + i)
            metadata.advance_step()
        query, key, value = tensors(2)
        found = impl.forward(query, key, value, cache, metadata)
        for i in range(2):
            said[i] = [torch.cat((old, new[i : i + 1].float())) for old, new in zip(said[i], (key, value), strict=True)]
            close(found[i : i + 1], dense_attention(query[i : i + 1].float(), *said[i], scale=0.25))


@pytest.mark.parametrize("features", [{}, {"logits_soft_cap": 2.0}, {"sinks": (0.5, -1.0, 2.0, 0.0)}])
def test_a_cascade_gives_what_one_pass_gives(generation: str, features: dict[str, Any]) -> None:
    if "sinks" in features and generation == "2":
        pytest.skip("generation 2 has no sinks")
    torch.manual_seed(0)
    size = standin.BLOCK[generation]
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25, **features), backend.allocate_kv_cache(32)
    batch = InputBatch(max_num_reqs=4, max_model_len=8 * size, block_size=size)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=16 * size)
    batch.add_request("a", [1, 2, 3])
    impl.forward(*tensors(2 * size), cache, builder.build({"a": 2 * size}))
    for name, own in (("b", 4), ("c", 5), ("d", 6)):
        shared = [1, 2] if name != "d" else []
        batch.add_request(name, [*shared, own, own + 10], num_computed_tokens=len(shared) * size)
    metadata = builder.build({"a": 1, "b": 3, "c": 2, "d": 4})
    cascade = backend.cascade(metadata, RULE)
    assert cascade is not None
    assert cascade.prefix.lengths.tolist() == [2 * size]
    given = tensors(metadata.num_tokens + 1)
    expected = impl.forward(*given, cache, metadata)
    close(impl.forward_cascade(*given, cache, metadata, cascade), expected)
    assert backend.cascade(metadata, CascadeRule(min_requests=4)) is None


def test_a_layer_whose_queries_see_the_prefix_differently_has_no_cascade(generation: str) -> None:
    backend = standin.create(generation)
    impl = backend.impl("layers.0", scale=0.25, sliding_window=8)
    with pytest.raises(ValueError, match="cascade: this layer has a window"):
        impl.forward_cascade(*tensors(1), None, None, None)
