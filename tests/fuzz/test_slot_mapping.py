"""compute_slot_mapping, fed integers, tables and lists that are right or lie: the slots of the oracle, or nothing."""

import array
from unittest import mock

import pytest
from fuzz.budget import examples
from fuzz.hostile import integers, mostly, names, sequences
from fuzz.outcomes import outcome
from hypothesis import given
from hypothesis import strategies as st

from attncore import slots
from attncore.kernels import host_functions

few = st.integers(0, 20)
tables = st.lists(st.integers(0, 60), max_size=6)
outs = st.sampled_from((list, lambda: [5], lambda: array.array("b"), lambda: array.array("q", [1])))


@pytest.mark.parametrize("way", [None, host_functions._does_nothing], ids=["kernels", "longer"])
@examples(300)
@given(
    profile=mostly(st.booleans(), integers), seq_id=mostly(st.integers(0, 2), names), seq_len=mostly(few, integers),
    context_len=mostly(few, integers), start_idx=mostly(few, integers),
    block_size=mostly(st.integers(1, 5), integers), table=mostly(tables, sequences), out=outs,
)  # fmt: skip
def test_slots_of_a_sequence(way, profile, seq_id, seq_len, context_len, start_idx, block_size, table, out):
    taken, before = out(), out()
    recipes = (profile, seq_id, seq_len, context_len, start_idx, block_size, table)
    given_profile, name, *lengths, ids = (recipe() for recipe in recipes)
    with mock.patch.object(host_functions, "_compiled", way):
        found = outcome(slots.compute_slot_mapping, given_profile, taken, name, *lengths, {1: ids})
    if found[0] != "answer":
        assert taken == before, "refused, and appended to"
        return
    values = [given_profile, *lengths, *(ids if type(ids) is list else [None])]
    if all(type(value) in (bool, int) for value in values):
        assert list(taken) == [*before, *expected(given_profile, *lengths, ids)]


def expected(profile, seq_len, context_len, start_idx, block_size, ids):
    """Token by token; IndexError where a token is in no block."""
    return [
        -1 if profile or token < start_idx else ids[token // block_size] * block_size + token % block_size
        for token in range(context_len, seq_len)
    ]
