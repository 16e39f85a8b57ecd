"""The loop, with real metadata and the reference backend; and faults, which its checks must find."""

import math

import numpy as np
import pytest

from attncore.replay import rank_builders
from attncore.replay.checks.attention_check import parts
from attncore.replay.layers.attention_layers import AttentionLayers
from attncore.replay.results.measurements import total
from attncore.replay.runner import replay
from attncore.replay.scheduling.cost_model import CostModel
from attncore.replay.scheduling.scheduler import Scheduler
from attncore.replay.settings import Settings
from attncore.replay.token_content import Content
from attncore.replay.traces.trace import Request

torch = pytest.importorskip("torch")

# Chunks, mixed steps, prefix hits (rows 3 and 4), preemption.
REQUESTS = [
    Request(1, 0.0, 90, 12, (1,)),
    Request(2, 0.0, 30, 40, (2,)),
    Request(3, 0.1, 100, 10, (1,)),
    Request(4, 0.2, 61, 1, (2,)),
    Request(5, 0.3, 7, 30),
]
SETTINGS = Settings(
    num_blocks=11,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    clock=CostModel(step=20_000),
    verify_every=1,
)


def layers(num_blocks=11, dtype="float32", kind=AttentionLayers):
    from attncore import BackendConfig
    from attncore.reference import ReferenceBackend

    backend = ReferenceBackend(BackendConfig(4, 2, 8, dtype, 16))
    return kind(backend, Content(4, 2, 8, seed=0), 2, num_blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention_matches_dense_attention(dtype):
    outcome = replay(REQUESTS, SETTINGS, layers(dtype=dtype))
    assert outcome.verification.failed == 0, outcome.verification.failures
    assert outcome.verification.checked > 25
    assert 0 <= outcome.verification.max_abs_error < (1e-5 if dtype == "float32" else 3e-2)
    assert outcome.preemptions
    assert outcome.prefix_hit_tokens
    assert len(outcome.steps.attention_ns) == len(outcome.steps.build_ns)


def test_steps_and_tokens_do_not_depend_on_attention(monkeypatch, kernels):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)
    with_attention, without = replay(REQUESTS, SETTINGS, layers()), replay(REQUESTS, SETTINGS)
    assert with_attention.kernels == without.kernels == kernels
    assert with_attention.verification.failed == 0
    for name in ("requests", "decodes", "prefill_tokens"):
        assert getattr(with_attention.steps, name) == getattr(without.steps, name)
    assert with_attention.virtual_seconds == without.virtual_seconds
    assert not without.steps.attention_ns
    assert without.verification.checked == len(without.steps.build_ns)
    assert without.verification.failed == 0


def test_every_token_is_counted():
    ample = replay(REQUESTS, Settings(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=24))
    computed = sum(request.prompt_tokens + request.output_tokens - 1 for request in REQUESTS)
    tokens = total(ample.steps.prefill_tokens) + total(ample.steps.decodes)
    assert tokens + ample.prefix_hit_tokens == computed
    assert total(ample.steps.decodes) == sum(request.output_tokens - 1 for request in REQUESTS)
    assert ample.widest_row == 7  # 109 tokens
    assert ample.requests == 5


def test_time_is_the_cost_model_s():
    alone = [Request(1, 0.0, 10, 3), Request(2, 100.0, 4, 1)]
    clock = CostModel(step=1e6, prefill=1e3, decode=1e5, context=0)
    outcome = replay(alone, Settings(clock=clock, rate=4))
    # Three steps and 10 + 2 tokens; idle until 25 s; one step and 4 tokens.
    assert 3 + 0.01 + 0.2 < 25
    assert outcome.virtual_seconds == pytest.approx(25 + 1 + 0.004)


def test_k_settles_how_many_steps_are_compared():
    outcome = replay(REQUESTS, Settings(verify_every=10, max_num_batched_tokens=256))
    assert outcome.verification.checked == math.ceil(len(outcome.steps.build_ns) / 10)


FAULTS = {
    "slot_mapping": lambda own: own("slot_mapping").__setitem__(-1, own("slot_mapping")[-1] ^ 1),
    "positions": lambda own: own("positions").__iadd__(1),
    "seq_lens": lambda own: own("seq_lens").__isub__(own("seq_lens") > 1),
    "block_table": lambda own: own("block_table")[:, :1].__setitem__(..., 10),
}


def planted(fault, at_step):
    class Faulty(rank_builders.MetadataBuilder):
        steps = 0

        def build(self, scheduled=None):
            metadata = super().build(scheduled or {})
            self.steps += 1
            if self.steps > at_step:
                fault(metadata.host._own)
            return metadata

    return Faulty


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_metadata_is_found(monkeypatch, name, attention):
    monkeypatch.setattr(rank_builders, "MetadataBuilder", planted(FAULTS[name], at_step=3))
    requests = [Request(1, 0.0, 30, 12), Request(2, 0.0, 20, 12)]
    settings = Settings(num_blocks=11, max_num_seqs=4, max_num_batched_tokens=24, verify_every=1)
    found = replay(requests, settings, layers() if attention else None).verification
    assert found.failed
    assert found.failures
    assert (name if not attention else "dense attention") in found.failures[0]
    assert found.failures[0].startswith("step ")
    assert int(found.failures[0].split()[1].strip(",:")) >= 3


def test_a_fault_in_attention_is_found_and_nan_is_one():
    class Broken(AttentionLayers):
        def forward(self, step, metadata):
            outputs, elapsed = super().forward(step, metadata)
            outputs[1] = outputs[1].clone()  # a tensor of inference mode cannot be changed here
            outputs[1][-1, 0, 0] = float("nan")
            return outputs, elapsed

    verification = replay(REQUESTS[:1], SETTINGS, layers(kind=Broken)).verification
    assert verification.failed == verification.checked > 0
    assert "nan" in verification.failures[0]
    assert verification.max_abs_error == 0  # of what is a number; JSON knows no NaN


class Canary(AttentionLayers):
    """Before each step, every cache slot that holds no token of a running request is NaN."""

    def forward(self, step, metadata):
        live = np.zeros(self.kv_caches[0].shape[1:3], dtype=bool)
        for request in [*step.decodes, *(prefill for prefill, _ in step.prefills)]:
            for position in range(request.computed):
                live[request.blocks[position // 16], position % 16] = True
        dead = torch.from_numpy(~live)
        for kv_cache in self.kv_caches:
            kv_cache[:, dead] = float("nan")
        self.overwritten = getattr(self, "overwritten", 0) + int(dead.sum())
        return super().forward(step, metadata)


def test_slots_that_nobody_owns_are_never_read():
    requests = [Request(one.row, one.arrival, one.prompt_tokens, one.output_tokens) for one in REQUESTS]
    canary = layers(kind=Canary)
    outcome = replay(requests, SETTINGS, canary)
    assert canary.overwritten > 1000
    assert outcome.preemptions
    assert outcome.verification.checked > 25
    assert outcome.verification.failed == 0, outcome.verification.failures


def test_caches_that_do_not_fit_name_num_blocks():
    with pytest.raises(ValueError, match=r"^num_blocks: no memory for 2 caches of 1000000000000 blocks of 16"):
        layers(num_blocks=10**12)


def test_a_request_that_can_never_run_ends_the_replay_before_it_begins(monkeypatch):
    monkeypatch.setattr(Scheduler, "schedule", None)
    with pytest.raises(ValueError, match=r"^num_blocks: row 1 of the trace"):
        replay(REQUESTS, Settings(num_blocks=7, max_num_batched_tokens=256))


def test_the_first_request_is_in_every_sample_and_its_first_and_last_decode_are_checked():
    settings = Settings(num_blocks=100, max_num_batched_tokens=256, verify_every=10**9)
    # One chunk, then generated tokens 2, 10 and the last one, 12.
    assert replay(REQUESTS, settings, layers(num_blocks=100)).verification.checked == 1 + 3


@pytest.mark.parametrize("count", [1, 48, 49, 100, 2048])
def test_the_parts_of_a_chunk_that_are_compared(count):
    found = parts(count)
    assert found[0][0] == 0
    assert found[-1][1] == count
    assert all(first < last for first, last in found)
    assert sum(last - first for first, last in found) == min(count, 48)
