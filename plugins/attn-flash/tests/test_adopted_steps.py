"""Adopted steps in the libraries' stand-ins on the CPU: random batches, eager and in captured sizes."""

from __future__ import annotations

import flash_standin as standin
import pytest
import torch

from attncore import AdoptedSteps
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
