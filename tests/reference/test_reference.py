"""Paged attention against dense attention. Every dead slot of every case holds NaN (see conftest)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.abstract import BackendConfig
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend
from attncore.reference import causal as paged_attention
from attncore.reference.scoring import Scoring, explicit, fused

SLOPES = [0.5, 0.25, 0.125, 0.0625]
MIXED = [(9, 1), (0, 5), (3, 1), (7, 6), (12, 1), (0, 1), (4, 4)]
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
    "all": {"sliding_window": 6, "logits_soft_cap": 3.0, "alibi_slopes": SLOPES, "sinks": [0.0, 1.0, -1.0, 0.3]},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_mixed_batch(paged_case, features, kv_heads):
    paged_case(MIXED, num_kv_heads=kv_heads, **features).check()


@pytest.mark.parametrize("context", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("query_len", [1, 2, 4, 5, 17])
def test_around_a_block(paged_case, context, query_len):
    paged_case([(context, query_len)]).check()
    paged_case([(context - 1, query_len), (0, context)]).check()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_around_a_window(paged_case, window):
    rows = [(c, q) for c in (0, window - 1, window, window + 1, 11) for q in (1, 2, 18)]
    paged_case(rows, sliding_window=window).check()
    paged_case(rows, sliding_window=window, null_passed=True).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 1), (16, 2)])
def test_groups(paged_case, heads, kv_heads):
    for features in ({}, {"logits_soft_cap": 2.0}):
        paged_case([(6, 1), (0, 3), (2, 20)], num_heads=heads, num_kv_heads=kv_heads, **features).check()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 2, 3, 16]),
    window=st.none() | st.integers(1, 30),
    cap=st.none() | st.floats(0.5, 20),
    alibi=st.booleans(),
    null_passed=st.booleans(),
    temporary=st.sampled_from([1, 300, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_random_batches(paged_case, rows, block_size, window, cap, alibi, null_passed, temporary, seed):
    case = paged_case(
        rows,
        block_size=block_size,
        sliding_window=window,
        logits_soft_cap=cap,
        alibi_slopes=SLOPES if alibi else None,
        null_passed=null_passed,
        seed=seed,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "CPU_ELEMENTS", temporary)
        case.check()


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.sampled_from([0, 0, 1, 7]), st.integers(1, 24)), max_size=3),
    decodes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 1, 1, 3])), max_size=5),
    window=st.none() | st.integers(1, 20),
    padded_rows=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_list_builder(paged_case, row, prompts, decodes, window, padded_rows, seed):
    if window is not None:  # the trimmed table of this builder is cut for one query: drafts would miss context
        decodes = [(context, 1) for context, _ in decodes]
    rows = [row(*prompt, prompt=True) for prompt in prompts] + [row(*decode) for decode in decodes]
    paged_case(rows, sliding_window=window, list_builder=True, padded_rows=padded_rows, seed=seed).check()


def test_the_trimmed_row_of_the_list_builder_is_what_the_rules_say(paged_case):
    case = paged_case([(13, 1)], sliding_window=8, list_builder=True)
    assert case.metadata.host.seq_lens.tolist() == [10]
    assert case.metadata.host.block_table.shape == (1, 3)
    case.check()


def test_prompts_without_any_table(paged_case, row):
    case = paged_case([row(0, 9, prompt=True), row(0, 2, prompt=True)], list_builder=True)
    assert case.metadata.block_table.shape == (2, 0)
    case.check()


@pytest.mark.parametrize("context", [0, 6])
def test_profiling_needs_no_cache(paged_case, row, context):
    case = paged_case([row(context, 9, profiling=True), row(context, 1, profiling=True)], sliding_window=4)
    case.check()
    for nothing in (None, torch.empty(0)):
        torch.testing.assert_close(case.forward(kv_cache=nothing), case.expected)


def test_profiling_beside_live_requests_in_a_wide_table(paged_case, row):
    paged_case([(9, 1), row(3, 5, profiling=True), (2, 1), row(2, 1, profiling=True)]).check()


@pytest.mark.parametrize("rows", [[(5, 1), (2, 1)], []])
def test_padding_gives_zeros(paged_case, rows):
    paged_case(rows, padded_tokens=3, padded_rows=2).check()
    paged_case(rows, padded_tokens=1, beyond=2).check()


def test_nothing_to_do(paged_case):
    case = paged_case([])
    assert case.forward().shape == (0, 4, 8)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("features", [{}, {"logits_soft_cap": 5.0}], ids=["fused", "explicit"])
def test_short_dtypes_differ_by_the_rounding_of_the_output_only(paged_case, dtype, tolerance, features):
    paged_case(MIXED, dtype=dtype, **features).check(tolerance)


def test_a_short_cache_rounds_fresh_and_cached_keys_alike(paged_case):
    paged_case(MIXED, dtype="float32", kv_cache_dtype="bfloat16").check()


@pytest.mark.parametrize("kind", ["query", "key", "value", "a token behind the query's first", "the cache"])
@pytest.mark.parametrize("temporary", [1, 1 << 19])
def test_an_output_that_shares_memory_with_what_is_read(paged_case, monkeypatch, kind, temporary):
    monkeypatch.setattr(paged_attention, "CPU_ELEMENTS", temporary)
    case = paged_case([(9, 1), (0, 20), (3, 18)], num_kv_heads=4, dead=0.0)
    memory = torch.cat([torch.zeros_like(case.query), case.query, case.key, case.value])
    before, case.query, case.key, case.value = memory.chunk(4)
    size, start = before.numel(), before.shape[1] * before.shape[2]
    places = {"query": size, "key": 2 * size, "value": 3 * size, "a token behind the query's first": size + start}
    output = (case.cache if kind == "the cache" else memory[:]).view(-1)[places.get(kind, 0) :][:size]
    assert case.forward(output=output.view_as(case.query)).data_ptr() == output.data_ptr()
    torch.testing.assert_close(output.view_as(case.query), case.expected, atol=2e-5, rtol=2e-5)


def test_output_is_used(paged_case):
    case = paged_case(MIXED)
    output = torch.full_like(case.query, 7.0)
    assert case.forward(output=output) is output
    torch.testing.assert_close(output, case.expected, atol=2e-5, rtol=2e-5)


def test_a_pair_of_caches_that_are_views(paged_case):
    case = paged_case(MIXED)
    pages = case.cache.transpose(0, 1).contiguous()  # (blocks, 2, ...), as some libraries want it
    torch.testing.assert_close(case.forward(kv_cache=(pages[:, 0], pages[:, 1])), case.expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.forward(), case.expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(pages.transpose(0, 1).nan_to_num(), case.cache.nan_to_num())


def test_fused_and_explicit_agree():
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, n, heads, 16) for n, heads in ((5, 6), (40, 2), (40, 2)))
    query_position = torch.arange(35, 40) - torch.tensor([[0], [7], [30]])
    distance = query_position.unsqueeze(2) - torch.arange(40)
    for window in (None, 3, 20):
        hidden = (distance < 0) | (distance >= (window or 100))
        scoring = Scoring(scale=0.3, sliding_window=window)
        written_out, no_lse = explicit(query, key, value, distance, hidden, scoring)
        torch.testing.assert_close(fused(query, key, value, hidden, scoring), written_out, atol=1e-5, rtol=1e-5)
        assert no_lse is None


def test_batched_and_single_requests_agree(paged_case, monkeypatch):
    case = paged_case([(30, 3), (8, 2), (17, 1), (1, 16)], sliding_window=9)
    batched = case.forward()
    monkeypatch.setattr(paged_attention, "MAX_BATCHED_QUERY", 0)
    torch.testing.assert_close(case.forward(), batched, atol=1e-5, rtol=1e-5)


def test_a_token_sees_a_prefix_written_in_the_same_step(paged_case):
    """Request 1 reads the block that request 0 writes in this step: the cache is written before anything is read."""
    case = paged_case([(0, 4), (4, 1)])
    host = case.metadata.host
    host.block_table[1, 0] = host.block_table[0, 0]
    output = case.forward()
    key, value = (torch.cat((x[:4], x[4:5])) for x in (case.key, case.value))
    expected = dense_attention(case.query[4:5], key, value, **case.features)
    torch.testing.assert_close(output[4:5], expected, atol=2e-5, rtol=2e-5)


def test_copy_on_write_and_swap_through_the_backend(paged_case):
    case = paged_case([(6, 1), (3, 1)])
    table = case.metadata.host.block_table
    elsewhere = case.backend.allocate_kv_cache(1)
    case.backend.swap_blocks(case.cache, elsewhere, [(table[0, 0], 0)])
    case.backend.copy_blocks([case.cache], [(table[0, 0], 0)])
    assert torch.equal(case.cache[:, 0], elsewhere[:, 0])
    case.cache[:, table[0, 0]] = torch.nan
    table[0, 0] = 0
    case.check()
    with pytest.raises(ValueError, match=r"^block_pairs: "):
        case.backend.copy_blocks([case.cache], [(0, 4)])


def test_blocks_that_the_values_do_not_have_are_refused_before_the_keys_are_written():
    backend = ReferenceBackend(BackendConfig(2, 2, 8, "float32", 4))
    keys, values = torch.randn(8, 4, 2, 8), torch.randn(4, 4, 2, 8)
    before = keys.clone()
    with pytest.raises(ValueError, match=r"^block_pairs: "):
        backend.swap_blocks((keys, values), (keys, values), [[0, 7]])
    assert torch.equal(keys, before)
