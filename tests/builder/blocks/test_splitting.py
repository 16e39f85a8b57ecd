"""Splits and the fewest swaps, against plain Python and a search of all ways."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.builder import (
    classify_requests,
    plan_reorder,
    reorder_batch,
    rows_after,
    split_decodes_and_prefills,
    split_three_ways,
)
from attncore.builder.blocks.splitting import DECODE, EXTEND, PREFILL

quick = settings(max_examples=200, deadline=None)
lengths = st.lists(st.integers(1, 9), max_size=40)


@pytest.fixture(autouse=True)
def on_both_kernels(kernels, monkeypatch):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)


def test_the_worked_numbers():
    assert split_decodes_and_prefills([1, 2, 1, 3, 2, 1, 2], 3) == (7, 12, 0, 0)
    assert split_decodes_and_prefills([4, 5, 6, 7], 3) == (0, 0, 4, 22)


def test_a_uniform_split_takes_the_leading_rows_of_one_length():
    assert split_decodes_and_prefills([2, 2, 2, 1, 3, 9], 3, require_uniform=True) == (3, 6, 3, 13)
    assert split_decodes_and_prefills([2, 2, 2, 1, 3, 9], 3) == (5, 10, 1, 9)
    assert split_decodes_and_prefills([9, 9], 3, require_uniform=True) == (0, 0, 2, 18)


def test_rows_of_padding_count_with_the_part_before_them():
    assert split_decodes_and_prefills([2, 2, 0, 0], 2, require_uniform=True) == (4, 4, 0, 0)
    assert split_decodes_and_prefills([1, 7, 0]) == (1, 1, 2, 7)
    assert split_decodes_and_prefills([]) == (0, 0, 0, 0)


@quick
@given(lengths=lengths, threshold=st.integers(1, 9))
def test_a_split_is_what_counting_says(lengths, threshold):
    lengths = sorted(lengths, key=lambda n: n > threshold)
    decodes = [n for n in lengths if n <= threshold]
    prefills = [n for n in lengths if n > threshold]
    expected = (len(decodes), sum(decodes), len(prefills), sum(prefills))
    assert split_decodes_and_prefills(lengths, threshold) == expected
    uniform = list(itertools.takewhile(lambda n: n == lengths[0], decodes))
    rest = lengths[len(uniform) :]
    assert split_decodes_and_prefills(np.array(lengths, np.int32), threshold, require_uniform=True) == (
        len(uniform), sum(uniform), len(rest), sum(rest),
    )  # fmt: skip


def kind_of(query_len, context_len, decode_threshold, extend_threshold):
    if query_len <= decode_threshold:
        return DECODE
    if context_len and (extend_threshold is None or query_len <= extend_threshold):
        return EXTEND
    return PREFILL


@st.composite
def batches(draw):
    rows = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=40))
    threshold = draw(st.integers(1, 5))
    return [q for q, _ in rows], [c for _, c in rows], threshold, draw(st.none() | st.integers(threshold, 9))


@quick
@given(batch=batches())
def test_a_reordered_batch_splits_three_ways(batch):
    queries, contexts, threshold, limit = batch
    kinds = [kind_of(q, c, threshold, limit) for q, c in zip(queries, contexts, strict=True)]
    assert classify_requests(queries, contexts, threshold, limit).tolist() == kinds
    swaps, split = reorder_batch(queries, contexts, threshold, limit)
    assert swaps.dtype == np.int32
    assert swaps.tolist() == plan_reorder(kinds).tolist()
    rows = rows_after(swaps, len(queries)).tolist()
    assert sorted(rows) == list(range(len(queries)))
    assert [kinds[row] for row in rows] == sorted(kinds)
    expected = []
    for kind in (DECODE, EXTEND, PREFILL):
        mine = [q for q, k in zip(queries, kinds, strict=True) if k == kind]
        expected += (len(mine), sum(mine))
    assert split == tuple(expected)
    moved = [queries[row] for row in rows], [contexts[row] for row in rows]
    assert split_three_ways(*moved, threshold, limit) == split
    if kinds != sorted(kinds):
        with pytest.raises(ValueError, match=r"query_lens: row \d+, a .* stands behind a .*put the batch in order"):
            split_three_ways(queries, contexts, threshold, limit)


@quick
@given(lengths=lengths, threshold=st.integers(1, 9))
def test_without_contexts_there_are_two_kinds_and_half_the_misplaced_rows_of_swaps(lengths, threshold):
    kinds = [PREFILL if n > threshold else DECODE for n in lengths]
    swaps, split = reorder_batch(lengths, decode_threshold=threshold)
    assert 2 * len(swaps) == sum(a != b for a, b in zip(kinds, sorted(kinds), strict=True))
    assert split[2:4] == (0, 0)
    order = [lengths[row] for row in rows_after(swaps, len(lengths))]
    assert split_decodes_and_prefills(order, threshold) == split[:2] + split[4:]


def fewest_swaps(kinds):
    """By search: breadth first over all arrays that swaps can reach."""
    goal, seen, edge, count = tuple(sorted(kinds)), {tuple(kinds)}, [tuple(kinds)], 0
    while goal not in seen:
        count += 1
        found = []
        for row in edge:
            for i, j in itertools.combinations(range(len(row)), 2):
                moved = list(row)
                moved[i], moved[j] = moved[j], moved[i]
                if tuple(moved) not in seen:
                    seen.add(tuple(moved))
                    found.append(tuple(moved))
        edge = found
    return count


@pytest.mark.parametrize("size", range(7))
def test_no_other_way_needs_fewer_swaps(size):
    for kinds in itertools.product(range(3), repeat=size):
        swaps = plan_reorder(kinds)
        assert len(swaps) == fewest_swaps(kinds), kinds
        assert [kinds[row] for row in rows_after(swaps, size)] == sorted(kinds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_decodes_and_prefills([1], 0), "decode_threshold: 0 is below 1"),
        (lambda: split_decodes_and_prefills([1], True), "decode_threshold: True is not an integer"),
        (lambda: split_decodes_and_prefills([1, -1]), "query_lens: -1 at index 1"),
        (lambda: split_decodes_and_prefills([1.5]), r"query_lens: float64\[1\]"),
        (lambda: split_decodes_and_prefills([[1]]), r"query_lens: int64\[1, 1\]"),
        (lambda: split_decodes_and_prefills([1, 4, 2], 3), "query_lens: row 2, a decode of 2 tokens, stands"),
        (lambda: classify_requests([1, 0]), "query_lens: 0 at index 1 is outside 1"),
        (lambda: classify_requests([1, 2], [0]), "context_lens: 1 length for 2 query_lens"),
        (lambda: classify_requests([2], [-1]), "context_lens: -1 at index 0"),
        (lambda: classify_requests([2], extend_threshold=4), "extend_threshold: given without context_lens"),
        (lambda: classify_requests([2], [1], 3, 2), "extend_threshold: 2 is below 3"),
        (lambda: reorder_batch([2, 0]), "query_lens: 0 at index 1"),
        (lambda: plan_reorder([0, 3]), r"kinds: 3 at index 1 is outside 0\.\.2"),
        (lambda: plan_reorder([0, -1, 3]), "kinds: -1 at index 1"),
        (lambda: plan_reorder([0.0]), r"kinds: float64\[1\]"),
        (lambda: rows_after([[0, 2]], 2), r"swaps: a row outside 0\.\.1"),
        (lambda: rows_after([0, 1], 2), r"swaps: int64\[2\]; give pairs"),
    ],
)  # fmt: skip
def test_bad_input_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()
