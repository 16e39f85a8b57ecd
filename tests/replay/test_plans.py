"""What of a build is the backend's plan, and the second run of the steps, over a clock that a test advances."""

import pytest

from attncore.replay import plans, rank_builders, runner
from attncore.replay.layers.attention_layers import AttentionLayers
from attncore.replay.settings import Settings
from attncore.replay.token_content import Content
from attncore.replay.traces.trace import Request

pytest.importorskip("torch")

REQUESTS = [Request(1, 0.0, 40, 5), Request(2, 0.1, 30, 7)]
SETTINGS = Settings(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=32)


@pytest.fixture
def clock(monkeypatch):
    """``now``, a list of one number: a build takes 7 ns of it, attention what a test says."""
    now = [0]

    class Timed(rank_builders.MetadataBuilder):
        def build(self, scheduled):
            now[0] += 7
            return super().build(scheduled)

    for module in (plans, runner):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(rank_builders, "MetadataBuilder", Timed)
    return now


def layers(during_plan=None):
    from attncore import BackendConfig
    from attncore.reference import ReferenceBackend

    class Planning(ReferenceBackend):
        def plan(self, metadata):
            during_plan()

    kind = Planning if during_plan else ReferenceBackend
    return AttentionLayers(kind(BackendConfig(4, 2, 8, "float32", 16)), Content(4, 2, 8, 0), 1, 20)


def test_a_plan_is_no_part_of_the_build(clock):
    def plan():
        clock[0] += 5000

    planning = layers(plan)
    outcome = runner.replay(REQUESTS, SETTINGS, planning)
    steps = outcome.steps
    assert len(steps.build_ns) > 6
    assert set(steps.build_ns) == set(outcome.hot_build_ns) == {7}
    assert set(steps.plan_ns) == {5000}
    assert len(steps.build_ns) == len(outcome.hot_build_ns) == len(steps.plan_ns)
    assert "plan" not in vars(planning.backend)


def test_a_backend_without_a_plan_has_no_times_of_one(clock):
    assert len(runner.replay(REQUESTS, SETTINGS, layers()).steps.plan_ns) == 0


def test_the_second_run_builds_the_same_steps_and_attends_none(clock, monkeypatch):
    scheduled = []
    apply = rank_builders.Ranks.apply
    monkeypatch.setattr(
        rank_builders.Ranks, "apply", lambda ranks, step: scheduled.append(apply(ranks, step)) or scheduled[-1]
    )
    attended, forward = [], AttentionLayers.forward
    monkeypatch.setattr(AttentionLayers, "forward", lambda *args: attended.append(args) or forward(*args))
    outcome = runner.replay(REQUESTS, SETTINGS, layers())
    number = len(outcome.steps.build_ns)
    assert len(attended) == number
    assert scheduled[:number] == scheduled[number:]
    assert len(scheduled) == 2 * number
    scheduled.clear()
    metadata_only = runner.replay(REQUESTS, SETTINGS)
    assert len(scheduled) == number  # once: its builds are hot
    assert metadata_only.hot_build_ns is metadata_only.steps.build_ns
