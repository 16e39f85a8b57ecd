"""Sets of sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncore import MultipleOf
from attncore.registry.spec.sizes import (
    as_sizes,
    describe,
    divisors_within,
    intersection,
    largest_to,
    smallest,
    smallest_from,
)

SIZES = st.one_of(
    st.frozensets(st.integers(1, 64), min_size=1),
    st.builds(MultipleOf, st.integers(1, 24)),
    st.integers(1, 24).flatmap(lambda base: st.builds(MultipleOf, st.just(base), st.integers(base, 96))),
)


@given(SIZES, SIZES)
def test_an_intersection_holds_what_both_hold(first, second):
    both = intersection(first, second)
    for size in range(1, 200):
        assert (size in both) == (size in first and size in second)


@given(SIZES, st.integers(1, 256))
def test_divisors_are_divisors_and_accepted(sizes, whole):
    found = divisors_within(sizes, whole)
    assert found == sorted((size for size in range(1, whole + 1) if whole % size == 0 and size in sizes), reverse=True)


@given(SIZES)
def test_the_smallest_is_a_member_with_none_below(sizes):
    assert smallest(sizes) in sizes
    assert not any(size in sizes for size in range(smallest(sizes)))


@given(SIZES, st.integers(1, 100))
def test_the_next_sizes_on_either_side(sizes, size):
    assert smallest_from(sizes, size) == next((one for one in range(size, 200) if one in sizes), None)
    assert largest_to(sizes, size) == next((one for one in range(size, 0, -1) if one in sizes), None)


def test_words():
    assert str(MultipleOf(256)) == "multiples of 256"
    assert str(MultipleOf(8, 256)) == "multiples of 8 up to 256"
    assert str(MultipleOf(1)) == "any size"
    assert describe(frozenset({128, 64})) == "64, 128"


@pytest.mark.parametrize("arguments", [(0,), (-1,), (True,), (1.5,), (16, 8)])
def test_multiples_of_nothing_are_refused(arguments):
    with pytest.raises(ValueError, match=r"^(base|maximum): "):
        MultipleOf(*arguments)


def test_zero_and_booleans_are_no_sizes():
    assert 0 not in MultipleOf(1)
    assert -16 not in MultipleOf(16)
    with pytest.raises(ValueError, match="block_sizes: True is not"):
        as_sizes("block_sizes", [True])


@pytest.mark.parametrize("sizes", [MultipleOf(1), MultipleOf(4), MultipleOf(3, 24), frozenset({7, 16, 48, 64})])
def test_divisors_are_those_of_plain_search(sizes):
    for whole in range(1, 200):
        assert divisors_within(sizes, whole) == [
            one for one in range(whole, 0, -1) if whole % one == 0 and one in sizes
        ]
    assert divisors_within(MultipleOf(2**20), 2**40)[0] == 2**40
