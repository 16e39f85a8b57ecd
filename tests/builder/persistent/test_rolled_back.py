"""Tokens of several requests taken back in one compiled call, beside the longer way that says what is wrong."""

import random

import numpy as np
import pytest

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder, StateGroup

_slots = pytest.importorskip("attncore._slots", reason="the compiled extension is not installed")
BLOCK = 4
ODD = (-1, 9999, 1 << 40, True, 2.0, "1", None, np.int8(1), np.array(1))


def batch_of(**options):
    return InputBatch(max_num_reqs=6, max_model_len=64, block_size=BLOCK, kernels="cython", **options)


def answer(batch, given):
    try:
        return batch.rollback_many(given)
    except (KeyError, TypeError, ValueError) as error:
        return type(error), str(error)


def computed(batch):
    return {name: batch.num_computed_tokens(name) for name in batch.req_ids}


def test_any_calls_have_the_same_effect_and_answer():
    rng = random.Random(0)
    pair = [batch_of(), batch_of()]
    pair[1]._roll_back_plain = None
    builders = [MetadataBuilder(batch, max_num_batched_tokens=64) for batch in pair]
    short = refused = 0
    for turn in range(1500):
        for name in {*range(4), "a", "b"} - {*pair[0].req_ids}:
            for batch in pair:
                batch.add_request(name, [*range(1, 17)])
        if rng.random() < 0.1:
            (gone,) = rng.sample(pair[0].req_ids, 1)
            for batch in pair:
                batch.preempt(gone) if turn % 2 else batch.remove_request(gone)
                if gone in batch.req_ids:
                    batch.append_blocks(gone, [*range(1, 17)])
            continue
        scheduled = {name: rng.randrange(0, 5) for name in pair[0].req_ids}
        if any(scheduled.values()):
            for batch, builder in zip(pair, builders, strict=True):
                if all(batch.num_computed_tokens(name) + count <= 64 for name, count in scheduled.items()):
                    builder.build(scheduled)
        held = computed(pair[0])
        given = {name: rng.randrange(0, held[name] + 1) for name in rng.sample(sorted(held, key=str), rng.randrange(4))}
        if given and rng.random() < 0.2:
            given[rng.choice(list(given))] = rng.choice(ODD)
        if rng.random() < 0.05:
            given["z"] = 1
        plain = pair[0]._core.kernels.roll_back(pair[0]._core.state, pair[0]._core.order, dict.fromkeys(given, 0))
        short += plain
        answers = [answer(batch, given) for batch in pair]
        assert answers[0] == answers[1], given
        refused += answers[0] is not None
        assert computed(pair[0]) == computed(pair[1]), given
    assert short > 800
    assert refused > 100


def test_where_one_goes_too_far_none_is_taken_back():
    batch = batch_of()
    roll_back = batch._roll_back_plain
    for name in ("a", "b"):
        batch.add_request(name, [1, 2], 8)
    assert not roll_back({"a": 1, "b": 9})
    assert computed(batch) == {"a": 8, "b": 8}
    assert roll_back({"a": 1, "b": 8})
    assert computed(batch) == {"a": 7, "b": 0}
    assert not roll_back({})
    with batch._core.enter():
        assert not roll_back({"a": 1})


def test_windows_and_states_take_the_longer_way():
    shape = {"max_num_reqs": 2, "max_model_len": 64, "kernels": "cython"}
    windowed = InputBatch(groups=[KVCacheGroup("w", BLOCK, sliding_window=8)], **shape)
    stateful = InputBatch(groups=[KVCacheGroup("k", BLOCK), StateGroup("s")], **shape)
    both = InputBatch(groups=[KVCacheGroup("k", BLOCK), KVCacheGroup("l", BLOCK)], **shape)
    ways = [batch._roll_back_plain for batch in (windowed, stateful, both)]
    assert [way is None for way in ways] == [True, True, False]
