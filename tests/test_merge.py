"""Partial attention merged by log-sum-exp equals attention over everything."""

import itertools
import math
import warnings

import pytest
import torch

from attncore.dense import dense_attention
from attncore.merge import merge_attention


def parts_of(query, key, value, *bounds, **options):
    """Attention of all queries, which come after all keys, over each part of the keys."""
    found = []
    for start, stop in itertools.pairwise(bounds):
        # The queries stand behind the keys, so that nothing is hidden but by its part.
        found.append(unmasked(query, key[start:stop], value[start:stop], **options))
    outputs, lses = zip(*found, strict=True)
    return list(outputs), list(lses)


def unmasked(query, key, value, **options):
    rows = [
        dense_attention(row.unsqueeze(0), key, value, scale=0.4, causal=False, return_lse=True, **options)
        for row in query
    ]
    return torch.cat([output for output, _ in rows]), torch.cat([lse for _, lse in rows])


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return torch.randn(5, 4, 8), torch.randn(23, 2, 8), torch.randn(23, 2, 6)


@pytest.mark.parametrize("bounds", [(0, 23), (0, 9, 23), (0, 1, 8, 22, 23)])
def test_any_split_of_the_keys_gives_the_whole(tensors, bounds):
    whole, whole_lse = unmasked(*tensors)
    output, lse = merge_attention(*parts_of(*tensors, *bounds))
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_the_last_queries_of_a_sequence_in_two_parts(tensors):
    _, key, value = tensors
    query = torch.randn(6, 4, 8)
    whole, whole_lse = dense_attention(query, key, value, scale=0.4, return_lse=True)
    context = unmasked(query, key[:17], value[:17])
    own = dense_attention(query, key[17:], value[17:], scale=0.4, return_lse=True)
    output, lse = merge_attention(*zip(context, own, strict=True))
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_a_sink_belongs_in_one_part(tensors):
    query, key, value = tensors
    sinks = [0.5, -1.0, 2.0, 0.0]
    whole, _ = unmasked(query, key, value, sinks=sinks)
    first = unmasked(query, key[:9], value[:9], sinks=sinks)
    second = unmasked(query, key[9:], value[9:])
    torch.testing.assert_close(merge_attention(*zip(first, second, strict=True))[0], whole)


def test_logarithms_to_base_2(tensors):
    whole, whole_lse = unmasked(*tensors)
    outputs, lses = parts_of(*tensors, 0, 9, 23)
    output, lse = merge_attention(outputs, [part / math.log(2) for part in lses], base2=True)
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(lse * math.log(2), whole_lse)


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 7.0])
def test_a_part_without_keys_weighs_nothing_whatever_it_holds(tensors, infinity, junk):
    whole, whole_lse = unmasked(*tensors)
    empty, no_keys = torch.full_like(whole, junk), torch.full_like(whole_lse, infinity)
    output, lse = merge_attention([empty, whole], [no_keys, whole_lse])
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(lse, whole_lse)
    output, lse = merge_attention([empty, empty], [no_keys, no_keys])
    assert output.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_large_logarithms_do_not_overflow(tensors):
    whole, whole_lse = unmasked(*tensors)
    outputs, lses = parts_of(*tensors, 0, 9, 23)
    output, lse = merge_attention(outputs, [part + 500 for part in lses])
    torch.testing.assert_close(output, whole)
    torch.testing.assert_close(lse, whole_lse + 500)


def test_the_merged_output_has_the_first_ones_dtype(tensors):
    outputs, lses = parts_of(*tensors, 0, 9, 23)
    output, lse = merge_attention([part.bfloat16() for part in outputs], lses)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(output.float(), unmasked(*tensors)[0], atol=0.02, rtol=0.02)


OUT, LSE = torch.zeros(3, 2, 4), torch.zeros(3, 2)
MOST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        ([], [], "outputs: empty"),
        ([OUT], [LSE, LSE], "lses: 2 for 1 outputs"),
        ([OUT, OUT[:2]], [LSE, LSE[:2]], r"outputs\[1\]: .* of shape \(2, 2, 4\)"),
        ([OUT.long()], [LSE], r"outputs\[0\]: torch.int64"),
        ([OUT[0]], [LSE], r"outputs\[0\]: .* of shape \(2, 4\)"),
        ([OUT], [LSE.T], r"lses\[0\]: .* of shape \(2, 3\) found; its output has .* \(3, 2\)"),
        ([OUT], [LSE.long()], r"lses\[0\]: torch.int64"),
        ([OUT, OUT.to("meta")], [LSE, LSE], r"outputs\[1\]: on meta, but outputs\[0\] is on cpu"),
    ],
)
def test_parts_that_disagree_are_named(outputs, lses, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        merge_attention(outputs, lses)


def nested():
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([OUT[0], OUT[0]])


def shrunk():
    tensor = OUT.clone()
    tensor.untyped_storage().resize_(4)
    return tensor


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        (lambda: [OUT, shrunk()], [LSE, LSE], r"outputs\[1\]: shape .* reaches beyond the tensor's memory"),
        (lambda: [nested()], [LSE], r"outputs\[0\]: nested, of layout"),
        (nested, [LSE], r"outputs: nested, of layout"),
        (lambda: [OUT.to_sparse()], [LSE], r"outputs\[0\]: of layout torch.sparse_coo"),
        (lambda: [OUT], [LSE.to_sparse()], r"lses\[0\]: of layout torch.sparse_coo"),
        (lambda: [OUT], LSE.to_sparse(), "lses: of layout torch.sparse_coo"),
        (lambda: torch.tensor(1.0), [LSE], "outputs: a tensor of no dimensions found; give a list"),
        (lambda: [OUT], torch.tensor(1.0), "lses: a tensor of no dimensions found; give a list"),
    ],
)
def test_tensors_that_cannot_be_read_are_named(outputs, lses, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        merge_attention(outputs(), lses)


@pytest.mark.parametrize(
    ("large", "small", "merged"), [(1e39, 0.0, MOST), (2e39, 1e39, MOST), (0.0, -1e39, 0.0), (-1e39, -2e39, -MOST)]
)
@pytest.mark.parametrize("base2", [False, True])
def test_a_logarithm_beyond_float32_is_no_part_without_keys(large, small, merged, base2):
    ones = torch.ones(1, 1, 1)
    lses = [torch.tensor([[number]], dtype=torch.float64) for number in (large, small, -math.inf)]
    output, lse = merge_attention([ones, 2 * ones, 3 * ones], lses, base2=base2)
    assert (output.item(), lse.item(), lse.dtype) == (1.0, merged, torch.float32)
    assert merge_attention([ones], lses[2:])[1].item() == -math.inf


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        (1, 2, r"outputs: int found; give a list of tensors"),
        ([torch.zeros(1, 1, 1)], {0: 1}, r"lses: dict found; give a list of tensors"),
        ([1], [2], r"outputs\[0\]: int found; give a tensor"),
        ([torch.zeros(1, 1, 1)], ["x"], r"lses\[0\]: str found; give a tensor"),
    ],
)
def test_what_is_no_tensor_is_named(outputs, lses, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        merge_attention(outputs, lses)


def test_a_logarithm_that_is_no_number_shows_in_the_output(tensors):
    outputs, lses = parts_of(*tensors, 0, 9, 23)
    lses[1][2] = math.nan
    output, lse = merge_attention(outputs, lses)
    assert output[2].isnan().all()
    assert lse[2].isnan().all()
    assert not output[:2].isnan().any()


def test_a_text_is_no_flag(tensors):
    with pytest.raises(TypeError, match=r"^base2: 'no' is not True or False"):
        merge_attention(*parts_of(*tensors, 0, 9, 23), base2="no")
