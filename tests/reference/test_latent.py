"""Latent caches, and values of a size of their own, against dense attention. Every dead slot holds NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore import BackendConfig
from attncore.reference import ReferenceBackend
from attncore.reference import causal as paged_attention

MIXED = [(9, 1), (0, 5), (3, 1), (7, 6), (12, 1), (0, 1), (4, 4), (2, 20)]
LATENT = {"num_kv_heads": 1, "head_size": 12, "head_size_v": 8, "use_mla": True}
SIZES = {"latent": LATENT, "narrow": {"head_size_v": 5}, "wide": {"head_size_v": 11}}
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "cap": {"logits_soft_cap": 1.5, "sinks": [0.5, -1.0, 2.0, 0.0]},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_mixed_batch(paged_case, sizes, features):
    paged_case(MIXED, padded_tokens=2, beyond=1, **sizes, **features).check()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=6),
    sizes=st.sampled_from([*SIZES.values(), LATENT | {"head_size_v": 12}, LATENT | {"head_size_v": None}]),
    window=st.none() | st.integers(1, 30),
    temporary=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_random_batches(paged_case, rows, sizes, window, temporary, seed):
    case = paged_case(rows, sliding_window=window, seed=seed, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "CPU_ELEMENTS", temporary)
        case.check()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_profiling_and_plain_prompts(paged_case, row, sizes):
    case = paged_case([row(0, 9, profiling=True), row(3, 1, profiling=True)], **sizes)
    case.check()
    torch.testing.assert_close(case.forward(kv_cache=None), case.expected)
    paged_case([row(0, 9, prompt=True), row(0, 2, prompt=True)], list_builder=True, **sizes).check()


def test_a_short_dtype_and_a_given_output(paged_case):
    case = paged_case(MIXED, dtype="bfloat16", **LATENT)
    case.check(1e-2)
    output = case.query.new_full((*case.query.shape[:2], 8), 7.0)
    assert case.forward(output=output) is output
    torch.testing.assert_close(output.float(), case.expected, atol=1e-2, rtol=1e-2)


def test_a_value_given_to_a_latent_layer_is_not_read(paged_case):
    case = paged_case(MIXED, **LATENT)
    torch.testing.assert_close(case.forward(value=torch.empty(0)), case.forward())


def test_the_caches_of_the_backend():
    config = {"num_heads": 4, "dtype": "bfloat16", "block_size": 4, "head_size": 12}
    latent = ReferenceBackend(BackendConfig(**config, num_kv_heads=1, head_size_v=8, use_mla=True))
    assert latent.allocate_kv_cache(5).shape == latent.kv_cache_shape(5, 4, 1, 12) == (5, 4, 12)
    uneven = ReferenceBackend(BackendConfig(**config, num_kv_heads=2, head_size_v=8))
    assert uneven.allocate_kv_cache(5).shape == uneven.kv_cache_shape(5, 4, 2, 12) == (5, 4, 2, 20)
    assert latent.kv_cache_block_axis() == uneven.kv_cache_block_axis() == 0


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_copy_on_write_and_swap(paged_case, sizes):
    case = paged_case([(6, 1), (3, 1)], **sizes)
    table = case.metadata.host.block_table
    elsewhere = case.backend.allocate_kv_cache(1)
    case.backend.swap_blocks(case.cache, elsewhere, [(table[0, 0], 0)])
    case.backend.copy_blocks([case.cache], [(table[0, 0], 0)])
    assert torch.equal(case.cache[0], elsewhere[0])
    case.cache[table[0, 0]] = torch.nan
    table[0, 0] = 0
    case.check()


@pytest.mark.parametrize(
    ("sizes", "name", "change"),
    [
        (LATENT, "key", lambda case: {"key": case.key[..., :8]}),
        (LATENT, "key", lambda case: {"key": case.key.expand(-1, 2, -1)}),
        (LATENT, "key", lambda _: {"key": None}),
        (LATENT, "output", lambda case: {"output": torch.empty_like(case.query)}),
        (LATENT, "kv_cache", lambda case: {"kv_cache": case.cache.unsqueeze(2)}),
        (LATENT, "kv_cache", lambda case: {"kv_cache": case.cache[..., :8]}),
        (LATENT, "kv_cache", lambda case: {"kv_cache": torch.stack([case.cache.unsqueeze(2)] * 2)}),
        (SIZES["narrow"], "value", lambda case: {"value": case.key}),
        (SIZES["narrow"], "value", lambda _: {"value": None}),
        (SIZES["narrow"], "output", lambda case: {"output": torch.empty_like(case.query)}),
        (SIZES["narrow"], "kv_cache", lambda case: {"kv_cache": torch.stack([case.cache[..., :8]] * 2)}),
        (SIZES["narrow"], "kv_cache", lambda case: {"kv_cache": case.cache[..., 1:]}),
        ({}, "kv_cache", lambda case: {"kv_cache": case.cache[0, :, :, 0]}),
    ],
)
def test_what_does_not_fit(paged_case, sizes, name, change):
    case = paged_case([(5, 1), (0, 3)], **sizes)
    before = case.cache.clone()
    with pytest.raises(ValueError, match=f"^{name}: "):
        case.forward(**change(case))
    torch.testing.assert_close(case.cache, before, equal_nan=True)
