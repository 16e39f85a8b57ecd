"""Attention without a write: the step's keys and values are in the cache; those that are given are not read."""

import pytest
import torch

MIXED = [(9, 1), (0, 5), (3, 1), (7, 6), (12, 1), (0, 1), (4, 4), (2, 20)]
CASES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "cap": {"logits_soft_cap": 1.5, "sinks": [0.5, -1.0, 2.0, 0.0]},
    "latent": {"num_kv_heads": 1, "head_size": 12, "head_size_v": 8, "use_mla": True},
    "values of a size of their own": {"head_size_v": 5},
    "padding": {"padded_tokens": 2, "padded_rows": 2, "beyond": 3},
}


def without_writing(case, **changes):
    before = case.cache.clone()
    found = case.forward(write=False, **changes)
    torch.testing.assert_close(case.cache, before, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_what_another_layer_wrote_is_read(paged_case, options):
    case = paged_case(MIXED, **options)
    case.forward()
    for given in ({"key": None, "value": None}, {"key": case.key * torch.nan, "value": case.value * torch.nan}):
        if case.backend.config.use_mla:
            given["value"] = None
        torch.testing.assert_close(without_writing(case, **given), case.expected, atol=2e-5, rtol=2e-5)


def test_the_log_sum_exp_too(paged_case):
    case = paged_case(MIXED)
    impl = case.backend.impl("layer", **case.features)
    wanted = impl.forward_with_lse(**case.given())
    found = impl.forward_with_lse(**case.given(key=None, value=None), write=False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_tokens_without_a_slot_bring_their_keys(paged_case, row):
    """Profiling: there is nothing in the cache. A run without a cache at all is as with a write."""
    case = paged_case([row(0, 9, profiling=True), row(3, 1, profiling=True)])
    torch.testing.assert_close(without_writing(case), case.expected)
    torch.testing.assert_close(case.forward(kv_cache=None, write=False), case.expected)
    with pytest.raises(ValueError, match=r"^key: None found; attention of type decoder needs a tensor"):
        case.forward(key=None, value=None, write=False)


def test_prompts_of_the_list_builder_without_a_table(paged_case, row):
    case = paged_case([row(0, 9, prompt=True), row(0, 2, prompt=True)], list_builder=True)
    case.forward()
    torch.testing.assert_close(without_writing(case), case.expected)


def test_a_pair_of_strided_views(paged_case):
    case = paged_case(MIXED)
    rows = torch.full((case.cache.shape[1], 2, 4, 16), torch.nan).transpose(1, 2)
    pair = rows[..., :8], rows[..., 8:]
    for view, part in zip(pair, case.cache, strict=True):
        view.copy_(part)
    torch.testing.assert_close(case.forward(kv_cache=pair), case.expected, atol=2e-5, rtol=2e-5)
    found = case.forward(kv_cache=pair, key=None, value=None, write=False)
    torch.testing.assert_close(found, case.expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("write", ["no", 0, 1, None])
def test_write_is_true_or_false(paged_case, write):
    case = paged_case(MIXED)
    for call in ("forward", "forward_with_lse"):
        before = case.cache.clone()
        with pytest.raises(TypeError, match=r"^write: .* is not True or False$"):
            getattr(case.backend.impl("layer", **case.features), call)(**case.given(), write=write)
        torch.testing.assert_close(case.cache, before, rtol=0, atol=0, equal_nan=True)
