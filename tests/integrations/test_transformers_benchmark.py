"""benchmarks/transformers_gpu.py measures what it says: tried on a CPU, with a tiny model."""

import argparse
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return pytest.importorskip("transformers_gpu")


def test_both_sides_are_warmed_up_with_other_tokens_and_measured(benchmark_module):
    args = argparse.Namespace(
        tiny=True, device="cpu", trace=None, theirs="sdpa", compile=False,
        requests=9, concurrent=4, new=3, budget=256, pool_tokens=8000,
    )  # fmt: skip
    model = benchmark_module.model_of(args)
    prompts = benchmark_module.prompts_of(args, model.config.vocab_size)
    row, outputs, engine = benchmark_module.ours(model, prompts, args, "reference")
    engine.close()
    assert row["tokens_from_prefixes"] == 0  # the warm-up left nothing that helps
    assert row["eager_steps"] == row["steps"] > 3
    parts = ("build_commit_us_a_step", "batch_us_a_step", "context_us_a_step")
    assert all(row[name] > 0 for name in parts)
    us = sum(row[name] for name in (*parts, "replay_us_a_step"))
    assert row["share_of_attncore"] == pytest.approx(us * row["steps"] / 1e6 / sum(engine.steps))
    row, said = benchmark_module.theirs(model, prompts, args, "defaults")
    assert said == outputs
    assert row["steps"] > 3
    assert min(row["step_ms"], row["prepare_us_a_step"], row["update_us_a_step"]) > 0


def test_the_launch_is_no_part_of_a_replay(benchmark_module):
    clocks = benchmark_module.Clocks()
    launched = []

    class Graph:
        def replay(self):
            launched.append(1)

    clocks.around(benchmark_module.ClockedGraph(Graph(), clocks).replay, "replay and launch")()
    assert launched == [1]
    assert clocks["replay and launch"] > clocks["launch"] > 0
