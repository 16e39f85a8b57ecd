"""Attention without a write: the step's keys and values are in the cache; those that are given are not read."""

import pytest
import torch

import attncore
from attncore.dense import dense_attention

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


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_tokens_that_an_engine_gave_no_slot_are_read_by_the_table(num_tokens, cache_dtype):
    """It has written them by itself; the row's context is read with a write, too."""
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "block_size": 16}
    backend = attncore.select(**request, kv_cache_dtype=cache_dtype, backend="reference").create("cpu")
    impl, cache = backend.impl("0", scale=0.25), backend.allocate_kv_cache(8)
    keys, values = torch.randn(2, 8, 16, 2, 16).mul(4).round().div(4)
    for part, held in zip(backend.kv_cache_views(cache), (keys, values), strict=True):
        part.copy_(held)
    lengths = torch.tensor([40, 23], dtype=torch.int32)
    metadata = attncore.AdoptedSteps(
        backend, max_num_reqs=2, max_num_tokens=64, max_model_len=64, num_blocks=8
    ).build(
        query_start_loc=torch.tensor([0, num_tokens, num_tokens + 1], dtype=torch.int32), seq_lens=lengths,
        block_table=torch.tensor([[3, 1, 7], [2, 4, 0]], dtype=torch.int32),
        slot_mapping=torch.full((num_tokens + 1,), -1),
    )  # fmt: skip
    query, start, expected, own = torch.randn(num_tokens + 1, 4, 16), 0, [], []
    for row, blocks in enumerate(([3, 1, 7], [2, 4])):
        count = metadata.host.query_lens[row]
        told = [part[blocks].flatten(0, 1)[: lengths[row]] for part in (keys, values)]
        expected.append(dense_attention(query[start : start + count], *told, scale=0.25))
        own.append([part[-count:] for part in told])
        start += count
    found = impl.forward(query, None, None, cache, metadata, write=False)
    torch.testing.assert_close(found, torch.cat(expected))
    given = [torch.cat(parts) for parts in zip(*own, strict=True)]
    torch.testing.assert_close(impl.forward(query, *given, cache, metadata), torch.cat(expected))


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
