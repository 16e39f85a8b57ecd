"""dense_attention itself, against sums written out and against torch."""

import math
import re

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attncore.dense import dense_attention


def by_hand(query, key, value, head, i, *, scale, causal=True, window=None, cap=None, slope=0.0, sink=None, spans=()):
    """One query of one head, in Python floats; returns the output and the log-sum-exp."""
    group = query.shape[1] // key.shape[1]
    position = len(key) - len(query) + i
    weights = {}
    for j in range(len(key)):
        hidden = (causal and j > position) or (window is not None and abs(position - j) >= window)
        if hidden and not any(start <= position < stop and start <= j < stop for start, stop in spans):
            continue
        score = scale * math.fsum((query[i, head] * key[j, head // group]).tolist())
        if cap is not None:
            score = cap * math.tanh(score / cap)
        weights[j] = math.exp(score - slope * abs(position - j))
    total = math.fsum(weights.values()) + (math.exp(sink) if sink is not None else 0.0)
    output = sum(weight / total * value[j, head // group] for j, weight in weights.items())
    return output, math.log(total)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spans", [[], [(0, 1), (1, 5), (6, 7)], [(4, 6)], [(2, 90)]])
def test_against_sums_written_out(window, cap, special, causal, spans):
    torch.manual_seed(1)
    query, key, value = torch.randn(4, 4, 6), torch.randn(7, 2, 6), torch.randn(7, 2, 6)
    slopes, sinks = ([0.5, 0.1, 0.9, 0.3], [0.4, -2.0, 1.5, 0.0]) if special else (None, None)
    output, lse = dense_attention(
        query,
        key,
        value,
        scale=0.4,
        causal=causal,
        sliding_window=window,
        logits_soft_cap=cap,
        alibi_slopes=slopes,
        sinks=sinks,
        spans=spans,
        return_lse=True,
    )
    for i in range(4):
        for head in range(4):
            extra = {"slope": slopes[head], "sink": sinks[head]} if special else {}
            extra |= {"scale": 0.4, "causal": causal, "window": window, "cap": cap, "spans": spans}
            row, total = by_hand(query, key, value, head, i, **extra)
            torch.testing.assert_close(output[i, head], row, atol=1e-5, rtol=1e-5)
            assert lse[i, head].item() == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_against_torch(causal):
    torch.manual_seed(2)
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, 4, 8), torch.randn(9, 4, 5)
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), is_causal=causal, scale=0.25
    )
    found = dense_attention(query, key, value, scale=0.25, causal=causal)
    torch.testing.assert_close(found, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [None, [0.5, -1.0]])
def test_fewer_keys_than_queries_where_positions_do_not_matter(sinks):
    query, key, value = torch.randn(5, 2, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 3)
    given = {"scale": 0.5, "causal": False, "sinks": sinks, "return_lse": True}
    output, lse = dense_attention(query, key, value, **given)
    for i in range(5):
        alone, total = dense_attention(query[i : i + 1], key, value, **given)
        torch.testing.assert_close(output[i], alone[0])
        torch.testing.assert_close(lse[i], total[0])
    output, lse = dense_attention(query, key[:0], value[:0], **given)
    assert output.shape == (5, 2, 3)
    assert not output.any()
    assert lse.tolist() == [sinks or [-math.inf] * 2] * 5
    for placed in ({"causal": True}, {"sliding_window": 3}, {"alibi_slopes": [1.0, 0.5]}):
        with pytest.raises(ValueError, match=r"^query: 5 tokens found; the whole sequence has 2 keys"):
            dense_attention(query, key, value, **(given | placed))


def test_short_dtypes_are_computed_in_float32():
    query = torch.randn(2, 1, 4).bfloat16()
    found = dense_attention(query, query, query, scale=1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, dense_attention(query.float(), query.float(), query.float(), scale=1.0))


@pytest.mark.parametrize("sinks", [None, [0.5, -1.0], [-math.inf, 3.0]])
def test_without_keys_the_output_is_zeros(sinks):
    query, none = torch.randn(3, 2, 4), torch.zeros(0, 1, 4)
    output, lse = dense_attention(query, none, none, scale=1.0, causal=False, sinks=sinks, return_lse=True)
    assert torch.equal(output, torch.zeros(3, 2, 4))
    assert lse.tolist() == [[-math.inf] * 2 if sinks is None else sinks] * 3
    assert torch.equal(dense_attention(query, none, none, scale=1.0, causal=False, sinks=sinks), output)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", {"query": torch.zeros(4, 4)}),
        ("query", {"query": torch.zeros(8, 4, 6)}),
        ("key", {"key": torch.zeros(7, 3, 6)}),
        ("key", {"key": torch.zeros(7, 2, 5)}),
        ("value", {"value": torch.zeros(6, 2, 6)}),
        ("value", {"value": torch.zeros(7, 2, 6, dtype=torch.int64)}),
        ("sliding_window", {"sliding_window": 0}),
        ("logits_soft_cap", {"logits_soft_cap": -1.0}),
        ("logits_soft_cap", {"logits_soft_cap": math.inf}),
        ("logits_soft_cap", {"logits_soft_cap": math.nan}),
        ("scale", {"scale": math.nan}),
        ("scale", {"scale": "x"}),
        ("alibi_slopes", {"alibi_slopes": [1.0]}),
        ("sinks", {"sinks": [1.0] * 5}),
        ("scale", {"scale": 1e39}),
        ("logits_soft_cap", {"logits_soft_cap": 1e-50}),
        ("query", {"query": None}),
        ("query", {"query": torch.zeros(4, 0, 6)}),
        ("query", {"query": torch.nested.nested_tensor([torch.zeros(2, 6)] * 4, layout=torch.jagged)}),
        ("value", {"value": torch.nested.nested_tensor([torch.zeros(2, 6)] * 7, layout=torch.jagged)}),
        ("key", {"key": torch.zeros(7, 2, 6).to_sparse()}),
        ("key", {"key": torch.zeros(7, 2, 6).to("meta")}),
        ("key", {"key": np.zeros((7, 2, 6))}),
        ("alibi_slopes", {"alibi_slopes": 5}),
        ("alibi_slopes[1]", {"alibi_slopes": [1.0, None, 1.0, 1.0]}),
        ("alibi_slopes[0]", {"alibi_slopes": torch.full((4,), math.nan)}),
        ("spans", {"spans": 5}),
        ("spans[1]", {"spans": [(0, 2), (3,)]}),
        ("spans[0]", {"spans": [(-1, 2)]}),
        ("sinks[3]", {"sinks": [-math.inf, 1.0, 1.0, math.inf]}),
    ],
)
def test_errors(name, change):
    given = {"query": torch.zeros(4, 4, 6), "key": torch.zeros(7, 2, 6), "value": torch.zeros(7, 2, 6), "scale": 1.0}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(name)}: "):
        dense_attention(**(given | change))
