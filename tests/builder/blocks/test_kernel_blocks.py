"""Manager blocks as kernel blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncore.builder import expand_blocks, kernel_blocks_per_block
from attncore.slots import build_slot_mapping


def test_the_worked_numbers():
    assert expand_blocks([0, 2], 4).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert expand_blocks([0, 2], 4).dtype == np.int32


@given(
    rows=st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=1, max_size=5),
    kernel_blocks=st.integers(1, 5),
    data=st.data(),
)
def test_a_rectangle_keeps_its_slots_and_its_padding(rows, kernel_blocks, data):
    held = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    expanded = expand_blocks(rows, kernel_blocks, num_blocks=held)
    for row, count, found in zip(rows, held, expanded.tolist(), strict=True):
        ids = [block * kernel_blocks + i for block in row[:count] for i in range(kernel_blocks)]
        assert found == ids + [0] * (3 * kernel_blocks - len(ids))
    whole = expand_blocks(rows, kernel_blocks)
    lens = [3 * kernel_blocks * 2] * len(rows)
    in_manager_blocks = build_slot_mapping(np.array(rows), np.zeros(len(rows), int), lens, 2 * kernel_blocks)
    assert build_slot_mapping(whole, np.zeros(len(rows), int), lens, 2).tolist() == in_manager_blocks.tolist()


def test_empty_rows_and_rectangles():
    assert expand_blocks([], 4).shape == (0,)
    assert expand_blocks(np.zeros((2, 0), np.int32), 4).shape == (2, 0)
    assert expand_blocks(np.zeros((0, 3), np.int32), 4).shape == (0, 12)


def test_the_highest_id_that_fits():
    assert expand_blocks([2**30 - 1], 2).tolist() == [2**31 - 2, 2**31 - 1]


def test_how_many_kernel_blocks_a_block_is():
    assert kernel_blocks_per_block(64, 16) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel_blocks_per_block(64, 24), "kernel_block_size: 24 does not divide the manager's block size 64"),
        (lambda: kernel_blocks_per_block(0, 24), "manager_block_size: 0 is below 1"),
        (lambda: kernel_blocks_per_block(16, 32), "kernel_block_size: 32 does not divide"),
        (lambda: expand_blocks([0], 0), "kernel_blocks: 0 is below 1"),
        (lambda: expand_blocks([-1], 2), "block_ids: block id -1 is outside"),
        (lambda: expand_blocks([2**31], 1), "block_ids: block id 2147483648 is outside"),
        (lambda: expand_blocks([2**30], 2), "block_ids: block 1073741824 of 2 kernel blocks does not fit int32"),
        (lambda: expand_blocks([0.5], 2), r"block_ids: float64\[1\]"),
        (lambda: expand_blocks(3, 2), r"block_ids: int64\[\]"),
        (lambda: expand_blocks([1], 2, num_blocks=[1]), "num_blocks: given for a single row"),
        (lambda: expand_blocks([[1]], 2, num_blocks=[1, 1]), "num_blocks: 2 counts for 1 row"),
        (lambda: expand_blocks([[1]], 2, num_blocks=[2]), "num_blocks: row 0 holds 2 blocks, but block_ids has 1"),
    ],
)
def test_bad_input_names_its_argument(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()
