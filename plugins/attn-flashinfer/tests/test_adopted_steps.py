"""Adopted steps on the CPU, the stand-in in FlashInfer's place: planned, run and replayed as steps of a builder are."""

from __future__ import annotations

import math

import flashinfer_standin as standin
import pytest
import torch

from attncore import AdoptedSteps, graphs
from attncore.testing.engines import captured_engine
from attncore.testing.engines.adopting_builder import AdoptingBuilder
from attncore.testing.engines.captured_engine import CapturedEngine


@pytest.mark.parametrize("kernel", ["tensor_cores", "cuda_cores", "xqa"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_random_batches_eager_and_captured(tokens: int, kernel: str) -> None:
    recorder = standin.Recorder()
    backend = standin.backend(recorder, block_size=16 if kernel == "xqa" else 4, options={"decode": kernel})
    engine = CapturedEngine(backend, tokens, junk=0.0 if kernel == "xqa" else math.nan, make_builder=AdoptingBuilder)
    for _ in range(12):
        engine.change()
        engine.replayed()
    assert recorder.of("prefill.plan")
    if kernel != "xqa" or tokens > 1:
        wrappers = {id(one["wrapper"]) for one in recorder.of("fast_decode_plan")}
        assert len(wrappers) == len(captured_engine.CAPTURED_SIZES), "one wrapper a captured size"


def test_the_plugin_does_not_wait_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps follow each other: AdoptedSteps waits for the last plan's copies, by an event behind them."""
    backend = standin.backend()
    backend.impl("layers.0", scale=0.5)
    steps = AdoptedSteps(backend, max_num_reqs=4, max_num_tokens=16, max_model_len=64, num_blocks=40)
    order: list[str] = []
    monkeypatch.setattr(steps._plans, "wait", lambda plan: order.append(f"wait {plan}"))
    monkeypatch.setattr(steps._plans, "record", lambda plan: order.append(f"record {plan}"))
    plan = backend.plan
    monkeypatch.setattr(backend, "plan", lambda metadata: (plan(metadata), order.append("plan")))
    given = {
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
        "block_table": torch.arange(1, 33, dtype=torch.int32).view(2, 16),
        "slot_mapping": torch.tensor([8, 76]),
    }
    for number in range(3):
        metadata = steps.build(**given)
        assert backend._follows is (number > 0)
        assert metadata.page_buffer[:5].tolist() == [1, 2, 17, 18, 19]
    assert order == ["wait 1", "plan", "record 0", "wait 0", "plan", "record 1", "wait 1", "plan", "record 0"]
    assert not graphs.is_capturing("cpu")


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_option_cascade_needs_a_table_on_the_host(on_cpu: bool) -> None:
    """On a GPU an adopted step has none there: its requests are read one by one."""
    recorder = standin.Recorder()
    backend = standin.backend(recorder, block_size=4, options={"cascade": True})
    impl, cache = backend.impl("layers.0", scale=0.5), backend.allocate_kv_cache(120)
    steps = AdoptedSteps(backend, max_num_reqs=8, max_num_tokens=16, max_model_len=400, num_blocks=120)
    if not on_cpu:
        steps._on_cpu = steps._known.checks = steps._sizes.values["_on_cpu"] = False
    starts, lengths = torch.arange(9, dtype=torch.int32), torch.full((8,), 257, dtype=torch.int32)
    table = torch.arange(1, 66, dtype=torch.int32).repeat(8, 1)
    table[:, 64] = 100 + torch.arange(8)
    metadata = steps.build(
        query_start_loc=starts, seq_lens=lengths, block_table=table, slot_mapping=4 * table[:, 64].long(),
        host_query_start_loc=starts.numpy(), host_seq_lens=lengths.numpy(),
    )  # fmt: skip
    query, key, value = (torch.randn(8, heads, 64).to(cache.dtype) for heads in (4, 2, 2))
    impl.forward(query, key, value, cache, metadata)
    assert [one["causal"] for one in recorder.of("prefill.plan")] == ([False, True] if on_cpu else [])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_an_engine_may_not_know_how_many_blocks_its_cache_has(on_cpu: bool) -> None:
    """vLLM tells no builder. On a GPU the host has no table, and what is on the device is not read."""
    backend = standin.backend(block_size=4)
    impl, cache = backend.impl("layers.0", scale=0.5), torch.zeros(backend.kv_cache_shape(40, 4, 2, 64)).bfloat16()
    steps = AdoptedSteps(backend, max_num_reqs=2, max_num_tokens=16, max_model_len=64, num_blocks=None)
    if not on_cpu:
        steps._on_cpu = steps._known.checks = steps._sizes.values["_on_cpu"] = False

    def run(block: int) -> torch.Tensor:
        table = torch.tensor([[3, 4], [7, block]], dtype=torch.int32)
        starts, lengths = torch.arange(3, dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
        metadata = steps.build(
            query_start_loc=starts, seq_lens=lengths, block_table=table, slot_mapping=4 * table[:, 1].long(),
            host_query_start_loc=starts.numpy(), host_seq_lens=lengths.numpy(),
        )  # fmt: skip
        query, key, value = (torch.randn(2, heads, 64).to(cache.dtype) for heads in (4, 2, 2))
        return impl.forward(query, key, value, cache, metadata)  # type: ignore[no-any-return]

    assert run(39).isfinite().all()
    if on_cpu:
        with pytest.raises(ValueError, match=r"block_table: row 1 names block 536870911 .* holds 536870911 blocks"):
            run(2**31 // 4 - 1)
        impl._kv_cache = None  # as if the layer met its cache in this step
        with pytest.raises(ValueError, match="metadata: block 40 is beyond the cache's num_blocks 40"):
            run(40)


def test_bounds_in_place_of_exact_lengths_are_refused() -> None:
    """FlashInfer's plan copies the host's page list to the device where no graph is replayed."""
    backend = standin.backend()
    steps = AdoptedSteps(backend, max_num_reqs=4, max_num_tokens=16, max_model_len=64, num_blocks=40)
    with pytest.raises(ValueError, match="bounded: backend 'flashinfer' needs exact lengths on the host"):
        steps.build(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32), seq_lens=torch.tensor([5], dtype=torch.int32),
            block_table=torch.ones((1, 16), dtype=torch.int32), slot_mapping=torch.tensor([4]),
            host_seq_lens=torch.tensor([6], dtype=torch.int32), bounded=True,
        )  # fmt: skip
