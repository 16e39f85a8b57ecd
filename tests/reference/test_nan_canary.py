"""What keeps NaN out: that the poison is really there, and that reading one wrong slot would show."""

import pytest
import torch

from attncore.reference import cache as kv_cache


def test_dead_slots_hold_nan_in_these_tests(paged_case):
    case = paged_case([(5, 1), (9, 2)], sliding_window=3, null_passed=True)
    assert case.cache[:, 0].isnan().all()
    live = case.metadata.host.block_table[1, 2]
    assert case.cache[:, live].isnan().any()  # the part of the last block that is still to come
    assert (case.metadata.host.block_table == 0).any()


@pytest.mark.parametrize("features", [{}, {"logits_soft_cap": 2.0}], ids=["fused", "explicit"])
@pytest.mark.parametrize("query_len", [1, 3, 20])
def test_only_visible_slots_are_read(paged_case, monkeypatch, features, query_len):
    case = paged_case([(21, query_len), (2, query_len), (40, query_len)], sliding_window=6, **features)
    seen = []
    read = kv_cache.read
    monkeypatch.setattr(kv_cache, "read", lambda cache, slots: seen.append(slots.flatten()) or read(cache, slots))
    case.forward()
    slots = torch.cat(seen).unique()
    assert not case.cache.flatten(1, 2)[:, slots].isnan().any()
    table, starts = case.metadata.host.block_table, case.metadata.host.query_start_loc
    allowed = set(case.metadata.host.slot_mapping.tolist())
    for row, context in enumerate((21, 2, 40)):
        assert starts[row + 1] - starts[row] == query_len
        allowed |= {int(table[row, t // 4]) * 4 + t % 4 for t in range(max(0, context - 5), context)}
    assert set(slots.tolist()) <= allowed


def test_a_nan_in_a_visible_slot_is_not_hidden(paged_case):
    case = paged_case([(9, 1), (6, 1)])
    case.cache[1, case.metadata.host.block_table[0, 1], 2] = torch.nan
    output = case.forward()
    assert output[0].isnan().any()
    assert output[1].isfinite().all()


def test_infinite_padding_stays_out(paged_case):
    paged_case([(5, 1), (0, 3)], padded_tokens=2, dead=float("inf")).check()
