"""The log-sum-exp that forward_with_lse gives: natural, of every query, what merges parts of a context to the whole."""

import copy

import numpy as np
import pytest
import torch

from attncore.dense import dense_attention
from attncore.merge import merge_attention

MIXED = [(9, 1), (0, 5), (3, 1), (7, 6), (12, 1), (0, 1), (4, 4), (2, 20)]
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "all": {
        "sliding_window": 6, "logits_soft_cap": 3.0, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
        "sinks": [0.0, 1.0, -1.0, 0.3],
    },
    "latent": {"num_kv_heads": 1, "head_size": 12, "head_size_v": 8, "use_mla": True},
}  # fmt: skip


def with_lse(case, **changes):
    return case.backend.impl("layer", **case.features).forward_with_lse(**case.given(**changes))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_against_dense(paged_case, features):
    case = paged_case(MIXED, padded_tokens=2, beyond=1, **features)
    keys = read_back(case)
    output, lse = with_lse(case)
    torch.testing.assert_close(output, case.expected, atol=2e-5, rtol=2e-5)
    assert (lse.shape, lse.dtype) == (case.query.shape[:2], torch.float32)
    starts = case.metadata.host.query_start_loc
    for row, (key, value) in enumerate(keys):
        tokens = slice(starts[row], starts[row + 1])
        wanted = dense_attention(case.query[tokens], key, value, **case.features, return_lse=True)[1]
        torch.testing.assert_close(lse[tokens], wanted, atol=2e-5, rtol=2e-5)
    assert (lse[starts[-1] :] == -torch.inf).all()


def read_back(case):
    """Keys and values of each row: what the cache holds of its context (NaN where nothing), then the step's own."""
    config, host = case.backend.config, case.metadata.host
    size_v = config.head_size_v or config.head_size
    caches = (case.cache[:, :, None], case.cache[:, :, None, :size_v]) if config.use_mla else case.cache
    found = []
    for row, length in enumerate(host.seq_lens):
        tokens = slice(host.query_start_loc[row], host.query_start_loc[row + 1])
        context = length - (tokens.stop - tokens.start)
        slots = [host.block_table[row, i // config.block_size] * config.block_size + i % config.block_size
                 for i in range(context)]  # fmt: skip
        pair = (torch.cat((cache.flatten(0, 1)[slots], new[tokens]))
                for cache, new in zip(caches, (case.key, case.value), strict=True))  # fmt: skip
        found.append([part.nan_to_num() for part in pair])  # passed by a window
    return found


def test_the_result_lies_where_it_is_asked_and_in_the_querys_dtype(paged_case):
    case = paged_case(MIXED, dtype="bfloat16")
    output = torch.full_like(case.query, 7.0)
    answer, lse = with_lse(case, output=output)
    assert answer is output
    assert lse.dtype == torch.float32
    torch.testing.assert_close(output.float(), case.expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("features", ["plain", "latent"])
def test_two_halves_of_a_context_merge_to_the_whole(paged_case, features):
    """The first blocks by one call, the rest and the step's own keys by another."""
    rows = [(9, 1), (13, 3), (4, 1), (30, 1)]
    case = paged_case(rows, **FEATURES[features])
    backend, host = case.backend, case.metadata.host
    block, size_v = backend.config.block_size, backend.config.head_size_v or backend.config.head_size
    blocks = np.array([context // block // 2 for context, _ in rows])
    assert blocks.tolist() == [1, 1, 0, 3]

    rest = copy.copy(case.metadata)
    rest.host = copy.copy(host)
    rest.host.seq_lens = host.seq_lens - blocks.astype(np.int32) * block
    table = np.zeros_like(host.block_table)
    for row, skipped in enumerate(blocks):
        table[row, : table.shape[1] - skipped] = host.block_table[row, skipped:]
    rest.host.block_table, rest.block_table = table, torch.from_numpy(table)
    later = with_lse(case, metadata=rest)

    earlier = (torch.full_like(later[0], torch.nan), torch.full_like(later[1], -torch.inf))
    for row, count in enumerate(blocks):
        tokens = slice(host.query_start_loc[row], host.query_start_loc[row + 1])
        slots = (
            torch.from_numpy(host.block_table[row, :count]).long()[:, None] * block + torch.arange(block)
        ).flatten()
        if backend.config.use_mla:
            key = case.cache.flatten(0, 1)[slots].unsqueeze(1)
            value = key[..., :size_v]
        else:
            key, value = case.cache.flatten(1, 2)[:, slots]
        earlier[0][tokens], earlier[1][tokens] = dense_attention(
            case.query[tokens], key, value, scale=case.features["scale"], causal=False, return_lse=True
        )
    merged, total = merge_attention([earlier[0], later[0]], [earlier[1], later[1]])
    whole, lse = with_lse(case)
    torch.testing.assert_close(merged, whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(merged, case.expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(total, lse, atol=2e-5, rtol=2e-5)
