"""Prefill and decode by different backends: one block size, one layout, one cache dtype."""

import pytest
from lookalikes import record

import attncore
from attncore import BackendSpec, Host, MultipleOf
from attncore.registry.choice import negotiate_installed
from attncore.registry.plugins import load

FIELDS = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}


def spec(name, **facts):
    base = {
        "devices": {"any": 10},
        "dtypes": {"bfloat16"},
        "head_sizes": {64},
        "block_sizes": MultipleOf(16),
        "kv_cache_layouts": ("NHD",),
    }
    return BackendSpec(name=name, api=1, factory="m:C", **{**base, **facts})


@pytest.fixture
def joint(monkeypatch):
    def ask(*specs, **fields):
        plugins = load.Registry(tuple(record(one, f"attn-{one.name}") for one in specs), {})
        monkeypatch.setattr(negotiate_installed, "registry", lambda: plugins)
        return attncore.select_joint(host=Host.assume("sm_90"), **{**FIELDS, **fields})

    return ask


def names(found):
    return found.prefill.name, found.decode.name


def test_each_phase_gets_its_best_when_they_share_a_cache(joint):
    found = joint(
        spec("p", devices={"any": 90}, phases={"prefill"}, block_sizes=MultipleOf(64)),
        spec("d", devices={"any": 90}, phases={"decode"}, block_sizes={16, 64, 256}, preferred_block_size=16),
        spec("both"),
    )
    assert names(found) == ("p", "d")
    assert found.block_size == found.prefill.block_size == found.decode.block_size == 64
    assert found.explain().startswith("prefill:\np (attn-p 0.1.0): chosen; priority 90 on any device\n")


def test_a_pair_without_a_common_block_is_passed_over(joint):
    found = joint(
        spec("p", devices={"any": 90}, phases={"prefill"}, block_sizes={256}),
        spec("d", devices={"any": 90}, phases={"decode"}, block_sizes={16}),
        spec("both", block_sizes={16, 32}),
    )
    assert names(found) == ("both", "d")
    assert found.block_size == 16


def test_a_pair_without_a_common_layout_is_passed_over(joint):
    found = joint(
        spec("p", devices={"any": 90}, phases={"prefill"}, kv_cache_layouts=("HND",)),
        spec("d", devices={"any": 80}, phases={"decode"}, kv_cache_layouts=("NHD",)),
        spec("e", phases={"decode"}, kv_cache_layouts=("NHD", "HND")),
    )
    assert names(found) == ("p", "e")
    assert found.kv_cache_layout == "HND"


def test_the_own_layouts_of_two_backends_are_not_one(joint):
    found = joint(
        spec("p", devices={"any": 90}, phases={"prefill"}, kv_cache_layouts=("own", "HND")),
        spec("d", devices={"any": 80}, phases={"decode"}, kv_cache_layouts=("own", "NHD")),
        spec("both", kv_cache_layouts=("own",)),
    )
    assert names(found) == ("both", "both")
    assert found.kv_cache_layout == "own"


def test_one_backend_for_both_wins_a_tie(joint):
    first = spec("a", devices={"any": 50}, block_sizes={16})
    assert names(joint(first, spec("b", devices={"any": 50}, block_sizes={16}))) == ("a", "a")


def test_preferences_by_phase(joint):
    specs = [spec("a"), spec("b")]
    assert names(joint(*specs, prefer_prefill=("b",))) == ("b", "a")
    assert names(joint(*specs, prefer_decode=("b",), prefer_prefill=("a",))) == ("a", "b")
    assert names(joint(*specs, prefer=("b",))) == ("b", "b")


def test_the_managers_block_is_shared_by_both(joint):
    found = joint(
        spec("p", phases={"prefill"}, block_sizes={32, 64}),
        spec("d", phases={"decode"}, block_sizes={16, 32}),
        manager_block_size=128,
    )
    assert found.block_size == 32
    assert found.decode.blocks_per_manager_block == 4


def test_none_says_why_for_both_phases(joint):
    with pytest.raises(attncore.NoBackendError) as caught:
        joint(spec("p", phases={"prefill"}, block_sizes={256}), spec("d", phases={"decode"}, block_sizes={16}))
    words = str(caught.value)
    assert "prefill:\np (attn-p 0.1.0): no block size and layout in common" in words
    assert "decode:\nd (attn-d 0.1.0): no block size and layout in common" in words


def test_a_single_choice_refuses_a_backend_of_one_phase(joint, monkeypatch):
    joint(spec("p", phases={"prefill"}), spec("d", phases={"decode"}))
    with pytest.raises(attncore.NoBackendError, match="phase prefill and decode not supported by attn-p"):
        attncore.select(host=Host.assume("sm_90"), **FIELDS)
    assert attncore.select(host=Host.assume("sm_90"), phase="decode", **FIELDS).name == "d"


def test_the_better_place_for_decode_wins_where_all_else_is_equal(joint):
    specs = [spec("a", block_sizes={16}), spec("b", block_sizes={32})]
    assert names(joint(*specs, prefer_prefill=("a",), prefer_decode=("b",))) == ("b", "b")


def test_the_sum_of_places_counts_not_one_phase_alone(joint):
    found = joint(
        spec("p", devices={"any": 90}, phases={"prefill"}, block_sizes={256}),
        spec("m", devices={"any": 50}, phases={"prefill"}, block_sizes={16}),
        spec("d", devices={"any": 90}, phases={"decode"}, block_sizes={16}),
        spec("e", devices={"any": 80}, phases={"decode"}, block_sizes={32}),
        spec("f", devices={"any": 70}, phases={"decode"}, block_sizes={256}),
    )
    assert names(found) == ("m", "d")


def test_one_backend_for_both_wins_over_a_pair_with_the_same_sum(joint):
    found = joint(
        spec("x", devices={"any": 90}, phases={"prefill"}, block_sizes={512}),
        spec("m", devices={"any": 50}, block_sizes={16}),
        spec("p", devices={"any": 10}, phases={"prefill"}, block_sizes={256}),
        spec("d", devices={"any": 90}, phases={"decode"}, block_sizes={256}),
    )
    assert names(found) == ("m", "m")
