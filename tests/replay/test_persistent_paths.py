"""Groups, drafts and ranks through the whole loop, with and without attention; faults that its checks must find."""

import numpy as np
import pytest

from attncore.builder import KVCacheGroup
from attncore.builder.slices import own_array
from attncore.replay import rank_builders
from attncore.replay.layers.attention_layers import AttentionLayers
from attncore.replay.results.measurements import total
from attncore.replay.runner import replay
from attncore.replay.scheduling.cost_model import CostModel
from attncore.replay.scheduling.draft_model import Speculation
from attncore.replay.settings import Settings
from attncore.replay.token_content import Content
from attncore.replay.traces.trace import Request

# Chunks, mixed steps, prefix hits (rows 3 and 4), preemption.
REQUESTS = [
    Request(1, 0.0, 90, 12, (1,)),
    Request(2, 0.0, 30, 40, (2,)),
    Request(3, 0.1, 100, 10, (1,)),
    Request(4, 0.2, 61, 1, (2,)),
    Request(5, 0.3, 7, 30),
]
GROUPS = (KVCacheGroup("full", 16), KVCacheGroup("window", 16, sliding_window=20), KVCacheGroup("other", 8))
TWO_FULL = (KVCacheGroup("a", 8), KVCacheGroup("b", 8))
WAYS = {
    "groups": {"groups": GROUPS, "num_blocks": 20},
    "a window alone": {"groups": GROUPS[1:2], "num_blocks": 8},
    "drafts": {"speculation": Speculation(3)},
    "all drafts accepted": {"speculation": Speculation(2, 1.0)},
    "no draft accepted": {"speculation": Speculation(2, 0.0)},
    "ranks": {"world_size": 2, "interleave": 4, "block_size": 8},
    "three ranks": {"world_size": 3, "block_size": 5, "num_blocks": 12},
    "groups and drafts": {"groups": GROUPS, "num_blocks": 20, "speculation": Speculation(3, 0.5)},
    "ranks and drafts": {"world_size": 2, "block_size": 8, "speculation": Speculation(2, 0.5)},
    "ranks, groups and drafts": {"world_size": 2, "groups": TWO_FULL, "speculation": Speculation(2, 0.5)},
}


def settings(**changes):
    common = {"num_blocks": 11, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 24, "verify_every": 1}
    return Settings(**common | {"clock": CostModel(step=20_000)} | changes)


def layers(of, num_layers=3):
    pytest.importorskip("torch")
    from attncore import BackendConfig
    from attncore.reference import ReferenceBackend
    from attncore.replay.layers.context_parallel_layers import ShardedLayers

    backends = {
        group.name: ReferenceBackend(BackendConfig(4, 2, 8, "float32", group.block_size)) for group in of.groups_of_rank
    }
    given = backends if of.groups else next(iter(backends.values()))
    windows = {group.name: group.sliding_window for group in of.groups_of_rank}
    arguments = given, Content(4, 2, 8, seed=0), num_layers, of.num_blocks, windows
    if of.world_size == 1:
        return AttentionLayers(*arguments)
    return ShardedLayers(*arguments, world_size=of.world_size, interleave=of.interleave)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_built_is_right(way, attention):
    how = settings(**WAYS[way])
    outcome = replay(REQUESTS, how, layers(how) if attention else None)
    steps, found = outcome.steps, outcome.verification
    assert found.failed == 0, found.failures
    assert found.checked >= (20 if attention else len(steps.build_ns))
    assert outcome.prefix_hit_tokens
    assert outcome.preemptions or way == "three ranks"
    assert bool(steps.passed_blocks) == any(group.sliding_window for group in how.groups_of_rank)
    if how.speculation is None:
        assert steps.drafted == 0
        assert total(steps.decode_tokens) == total(steps.decodes)
    else:
        assert steps.drafted == total(steps.decode_tokens) - total(steps.decodes) > 0
        # Every token but the first is a decode's own or an accepted draft; what a preemption took is a prompt again.
        assert total(steps.decodes) + steps.accepted <= sum(request.output_tokens - 1 for request in REQUESTS)
        assert (steps.accepted == steps.drafted) == (how.speculation.acceptance == 1)
        assert (steps.accepted == 0) == (how.speculation.acceptance == 0)


def test_accepted_drafts_save_steps_and_nothing_else_changes():
    ample = {"num_blocks": 100, "max_num_batched_tokens": 64}
    plain, half, whole = (
        replay(REQUESTS, settings(**ample, speculation=drafts))
        for drafts in (None, Speculation(3, 0.5), Speculation(3, 1.0))
    )
    assert len(plain.steps.build_ns) > len(half.steps.build_ns) > len(whole.steps.build_ns)
    for outcome in (plain, half, whole):
        own = sum(request.output_tokens - 1 for request in REQUESTS)
        assert total(outcome.steps.decodes) + outcome.steps.accepted == own


def test_the_same_seed_draws_the_same_drafts():
    one, two, other = (replay(REQUESTS, settings(speculation=Speculation(3), seed=seed)) for seed in (1, 1, 2))
    assert one.steps.decode_tokens == two.steps.decode_tokens != other.steps.decode_tokens


class WrongSlot(rank_builders.MetadataBuilder):
    """The last token of each step goes elsewhere, in the second group alone."""

    def build(self, scheduled):
        metadata = super().build(scheduled)
        own_array(metadata.groups["window"].host, "slot_mapping")[-1] ^= 1
        return metadata


class WrongTable(rank_builders.MetadataBuilder):
    """The second group's table names a block of somebody else."""

    def build(self, scheduled):
        metadata = super().build(scheduled)
        table = own_array(metadata.groups["window"].host, "block_table")
        table[-1, (metadata.host.seq_lens[-1] - 1) // 16] = 9
        return metadata


def wrong_rank(batch, backend=None, *, context_parallel, **arguments):
    """The second rank builds what the first has."""
    first = rank_builders.ContextParallel(
        context_parallel.world_size, 0, context_parallel.block_size, context_parallel.interleave
    )
    return sound_builder(batch, backend, context_parallel=first, **arguments)


sound_builder = rank_builders.MetadataBuilder


class WrongRollback(rank_builders.InputBatch):
    """An accepted draft is taken back with those that were rejected."""

    def rollback_many(self, num_tokens):
        super().rollback_many({row: count + bool(count) for row, count in num_tokens.items()})


class SilentWindow(rank_builders.InputBatch):
    """Says of no block that its window has passed it."""

    def release_passed_blocks(self, num_rollback=0):
        super().release_passed_blocks(num_rollback)
        return {}


FAULTS = {
    "slot": ("groups", "MetadataBuilder", WrongSlot, "group window: slot_mapping: "),
    "table": ("groups", "MetadataBuilder", WrongTable, "group window: "),
    "rank": ("ranks", "MetadataBuilder", wrong_rank, "rank 1: slot_mapping: "),
    "rollback": ("drafts", "InputBatch", WrongRollback, "slot_mapping: "),
    "window": ("groups", "InputBatch", SilentWindow, "that windows have passed: None found, "),
}


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(monkeypatch, fault, attention):
    way, name, faulty, sentence = FAULTS[fault]
    monkeypatch.setattr(rank_builders, name, faulty)
    how = settings(**WAYS[way] | {"num_blocks": 40})
    requests = [Request(1, 0.0, 40, 30), Request(2, 0.0, 20, 24)]
    found = replay(requests, how, layers(how) if attention else None).verification
    assert found.failed
    assert (sentence if not attention or fault == "window" else "differs from dense") in found.failures[0]


def test_rejected_drafts_leave_keys_of_their_own_behind():
    """What a rejected draft wrote is not what comes there later: a stale key would be seen."""
    how = settings(speculation=Speculation(3, 0.5))
    checked = layers(how, 1)
    written = {}
    attend = checked.attend

    def watched(layer, tokens, ranks):
        host = ranks[0].host
        for index, row in enumerate(ranks[0].req_ids):
            for token in range(host.query_start_loc[index], host.query_start_loc[index + 1]):
                place = row, int(host.positions[token])
                written.setdefault(place, []).append(tokens[1][token].clone())
        return attend(layer, tokens, ranks)

    checked.attend = watched
    outcome = replay(REQUESTS[4:], how, checked)
    assert outcome.verification.failed == 0
    again = [keys for keys in written.values() if len(keys) > 1]
    assert again
    assert all(not np.array_equal(keys[0], keys[-1]) for keys in again)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_long_workloads(way):
    from attncore.replay.traces.synthetic import synthetic_trace

    how = settings(**WAYS[way] | {"num_blocks": 1500, "max_num_seqs": 64, "max_num_batched_tokens": 2048,
                                  "clock": CostModel(), "verify_every": 8})  # fmt: skip
    outcome = replay(synthetic_trace(200, seed=3).requests, how)
    assert outcome.verification.failed == 0, outcome.verification.failures
    assert outcome.verification.checked > 100
