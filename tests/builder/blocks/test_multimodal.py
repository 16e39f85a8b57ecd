"""Placeholder maps against a map made a token at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore.builder import Placeholder, placeholder_map


@st.composite
def requests(draw):
    """(placeholders, context, query) of one request, ranges in any order."""
    ranges, offset = [], 0
    for _ in range(draw(st.integers(0, 4))):
        offset += draw(st.integers(0, 4))
        length = draw(st.integers(1, 6))
        ranges.append(Placeholder(draw(st.integers(0, 9)), offset, length, draw(st.integers(0, 5))))
        offset += length
    return draw(st.permutations(ranges)), draw(st.integers(0, 20)), draw(st.integers(0, 20))


@settings(max_examples=200, deadline=None)
@given(batch=st.lists(requests(), max_size=4))
def test_every_token_of_the_step_takes_its_own_row(batch):
    expected, token = [], 0
    for row, (ranges, context, query) in enumerate(batch):
        for position in range(context, context + query):
            for item, offset, length, start in ranges:
                if offset <= position < offset + length:
                    expected.append((token, row, item, start + position - offset))
            token += 1
    found = placeholder_map([ranges for ranges, _, _ in batch], [c for _, c, _ in batch], [q for _, _, q in batch])
    assert list(zip(*(array.tolist() for array in found[:4]), strict=True)) == expected
    assert [array.dtype for array in found[:4]] == [np.int64, np.int32, np.int32, np.int64]
    unrolled = [
        (token, run.req_index, run.item, run.embedding_start + token - run.token_start)
        for run in found.runs
        for token in range(run.token_start, run.token_stop)
    ]
    assert unrolled == expected


def test_chunks_of_a_prompt_take_each_row_once():
    image = [[Placeholder(0, 3, 10)]]
    rows = []
    for context, query in ((0, 5), (5, 4), (9, 8), (17, 1)):
        rows += placeholder_map(image, [context], [query]).embedding_indices.tolist()
    assert rows == list(range(10))
    assert placeholder_map(image, [5], [4]).token_indices.tolist() == [0, 1, 2, 3]


ONE = Placeholder(0, 0, 4)


@pytest.mark.parametrize(
    ("placeholders", "context", "query", "message"),
    [
        ([[ONE]], [0, 0], [1, 1], "placeholders: those of 1 request for 2"),
        ([[ONE]], [0, 0], [1], "context_lens: 2 lengths for 1 request"),
        ([[ONE]], [0], [-1], "query_lens: -1 at index 0"),
        ([[], [ONE, Placeholder(1, 3, 2)]], [0, 0], [1, 1], r"placeholders\[1\]: items 0 and 1 both take token 3"),
        ([[Placeholder(0, -1, 2)]], [0], [1], r"placeholders\[0\]\[0\].offset: -1 is below 0"),
        ([[ONE, Placeholder(0, 9, 0)]], [0], [1], r"placeholders\[0\]\[1\].length: 0 is below 1"),
        ([[Placeholder(-1, 0, 1)]], [0], [1], r"placeholders\[0\]\[0\].item: -1 is below 0"),
        ([[Placeholder(0, 0, 1, -2)]], [0], [1], r"placeholders\[0\]\[0\].embedding_start: -2 is below 0"),
        ([[Placeholder("x", 0, 1)]], [0], [1], r"placeholders\[0\]\[0\].item: 'x' is not an integer"),
        ([[Placeholder(0, 2**31, 1)]], [0], [1], r"placeholders\[0\]\[0\].offset: 2147483648 does not fit int32"),
        ([ONE], [0], [1], r"placeholders\[0\]: Placeholder.* is not a list"),
        ([None], [0], [1], r"placeholders\[0\]: None is not a list"),
        ([[(0, 1)]], [0], [1], r"placeholders\[0\]\[0\]: \(0, 1\) is not a Placeholder"),
    ],
)
def test_bad_input_names_its_argument(placeholders, context, query, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        placeholder_map(placeholders, context, query)
