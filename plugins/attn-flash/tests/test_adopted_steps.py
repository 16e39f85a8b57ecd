"""Adopted steps in the libraries' stand-ins on the CPU: random batches, eager and in captured sizes."""

from __future__ import annotations

import flash_standin as standin
import pytest
import torch

from attncore import AdoptedSteps
from attncore.builder import CascadeRule
from attncore.dense import dense_attention
from attncore.testing.engines.adopting_builder import AdoptingBuilder
from attncore.testing.engines.captured_engine import CapturedEngine


@pytest.fixture(params=["2", "3", "3_vllm", "4"])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    standin.install(monkeypatch, request.param, standin.MADE[request.param]())
    return str(request.param)


@pytest.mark.parametrize("tokens", [1, 3])
def test_random_batches_eager_and_captured(generation: str, tokens: int) -> None:
    engine = CapturedEngine(standin.create(generation), tokens, make_builder=AdoptingBuilder)
    for _ in range(12):
        engine.change()
        engine.replayed()


def test_a_plan_of_decodes_outlasts_its_step(generation: str) -> None:
    """It is kept by the tensors of lengths and table: the same objects as long as the engine's lie in one place."""
    backend = standin.create(generation)
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(20)
    size = standin.BLOCK[generation]
    steps = AdoptedSteps(backend, max_num_reqs=4, max_num_tokens=64, max_model_len=4 * size, num_blocks=20)
    starts, lengths = torch.arange(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    table = torch.arange(1, 17, dtype=torch.int32).view(4, 4)
    plans = []
    for step in range(3):
        lengths[:2] = torch.tensor([5 + step, 9 + step])
        metadata = steps.build(
            query_start_loc=starts, seq_lens=lengths[:2], block_table=table[:2],
            slot_mapping=torch.tensor([size + 4 + step, 5 * size + 8 + step]),
        )  # fmt: skip
        impl.forward(*(torch.randn(2, heads, 16).bfloat16() for heads in (4, 2, 2)), cache, metadata)
        (plan,) = metadata.kept.values()
        plans.append(plan)
        assert metadata.seq_start_loc.tolist() == [0, 5 + step, 14 + 2 * step]
    assert plans[0] is plans[1] is plans[2]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_plan_of_decodes_is_not_that_of_more_tokens(generation: str, rows: int) -> None:
    """An engine's rows run one token, and in the next step drafts as well: its lengths and table lie where they lay."""
    torch.manual_seed(0)
    backend, size = standin.create(generation), standin.BLOCK[generation]
    impl, cache = backend.impl("layers.0", scale=0.25), backend.allocate_kv_cache(4)
    steps = AdoptedSteps(
        backend, max_num_reqs=2, max_num_tokens=64, max_model_len=size, num_blocks=4, decode_threshold=3
    )
    starts, lengths, table, slots = (
        torch.zeros(shape, dtype=dtype)
        for shape, dtype in ((3, torch.int32), (2, torch.int32), ((2, 1), torch.int32), (64, torch.int64))
    )
    table[:, 0] = torch.tensor([1, 2])
    said = [[torch.zeros(0, 2, 16)] * 2 for _ in range(rows)]
    for counts in ([1, 1], [1, 1], [3, 3], [2, 2], [1, 2], [1, 1], [2, 1]):
        counts = counts[:rows]
        starts[1 : rows + 1] = torch.tensor(counts).cumsum(0)
        num_tokens = sum(counts)
        slots[:num_tokens] = torch.cat(
            [torch.arange(count) + (row + 1) * size + len(said[row][0]) for row, count in enumerate(counts)]
        )
        lengths[:rows] += torch.tensor(counts, dtype=torch.int32)
        metadata = steps.build(
            query_start_loc=starts[: rows + 1], seq_lens=lengths[:rows], block_table=table[:rows],
            slot_mapping=slots[:num_tokens],
        )  # fmt: skip
        query, key, value = (torch.randn(num_tokens, heads, 16).bfloat16() for heads in (4, 2, 2))
        found, start = impl.forward(query, key, value, cache, metadata), 0
        for row, count in enumerate(counts):
            mine = slice(start, start + count)
            said[row] = [torch.cat((old, new[mine].float())) for old, new in zip(said[row], (key, value), strict=True)]
            expected = dense_attention(query[mine].float(), *said[row], scale=0.25)
            torch.testing.assert_close(found[mine].float(), expected, atol=3e-2, rtol=3e-2)
            start += count


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_step_whose_table_the_host_lacks_has_no_cascade(generation: str, on_cpu: bool) -> None:
    """As on a GPU, where nobody reads the engine's."""
    backend, size = standin.create(generation), standin.BLOCK[generation]
    steps = AdoptedSteps(backend, max_num_reqs=4, max_num_tokens=64, max_model_len=4 * size, num_blocks=20)
    if not on_cpu:
        steps._on_cpu = steps._known.checks = steps._sizes.values["_on_cpu"] = False
    starts, lengths = torch.arange(3, dtype=torch.int32), torch.full((2,), size + 1, dtype=torch.int32)
    metadata = steps.build(
        query_start_loc=starts, seq_lens=lengths, slot_mapping=torch.tensor([2 * size, 3 * size]),
        block_table=torch.tensor([[1, 2], [1, 3]], dtype=torch.int32),
        host_query_start_loc=starts.numpy(), host_seq_lens=lengths.numpy(),
    )  # fmt: skip
    rule = CascadeRule(min_requests=2, min_prefix_tokens=1, min_saving=0.0)
    assert (backend.cascade(metadata, rule) is not None) == on_cpu
