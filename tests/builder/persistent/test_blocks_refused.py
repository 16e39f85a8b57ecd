"""Blocks that cannot stand where they are given: the null block, and a block that its request has already."""

import pytest

from attncore.builder import InputBatch, KVCacheGroup
from tests.core_state import core_state

FULL, WINDOW = KVCacheGroup("full", 4), KVCacheGroup("window", 8, kernel_block_size=4, sliding_window=8)
NULL = "block 0 at index {}, the null block, where no window has passed"
TWICE = "block {} stands at index {} and again at {}"


@pytest.fixture
def batch(kernels):
    """One group, of which the batch knows no window."""
    return InputBatch(max_num_reqs=4, max_model_len=4096, block_size=4, kernels=kernels)


@pytest.fixture
def grouped(kernels):
    return InputBatch(max_num_reqs=4, max_model_len=4096, groups=[FULL, WINDOW], kernels=kernels)


def refused(batch, call, text):
    before = core_state(batch)
    with pytest.raises(ValueError, match=f"^block_ids: request 'z': {text}"):
        call()
    assert core_state(batch) == before


@pytest.mark.parametrize(
    ("ids", "computed", "text"),
    [
        ([0], 0, NULL.format(0)),
        ([1, 0], 3, NULL.format(1)),
        ([0, 0, 9], 7, NULL.format(1)),
        (range(3), 0, NULL.format(0)),
        ([2, 2], 0, TWICE.format(2, 0, 1)),
        ([2, 3, 2], 0, TWICE.format(2, 0, 2)),
        ([0, 5, 0, 5], 12, TWICE.format(5, 1, 3)),
        ([*range(1, 900), 899], 0, TWICE.format(899, 898, 899)),
    ],
)
def test_a_new_request(batch, ids, computed, text):
    refused(batch, lambda: batch.add_request("z", ids, computed), text)
    assert "z" not in batch
    assert batch.add_request("z", [0, 0, 9], 8) == 0


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0], NULL.format(3)),
        ([7, 7], TWICE.format(7, 3, 4)),
        ([6], TWICE.format(6, 2, 3)),
        ([5], TWICE.format(5, 1, 3)),
    ],
)
def test_more_blocks(batch, ids, text):
    batch.add_request("z", [0, 5, 6], 8)
    refused(batch, lambda: batch.append_blocks("z", ids), text)
    batch.append_blocks("z", [7])
    assert batch.block_ids("z") == [0, 5, 6, 7]


def test_a_block_that_a_request_got_back(batch):
    """A preempted request computes all its tokens anew: it comes back without blocks that a window has passed."""
    batch.add_request("z", [0, 5, 6], 8)
    assert batch.preempt("z") == [0, 5, 6]
    refused(batch, lambda: batch.append_blocks("z", [0, 5, 6]), NULL.format(0))
    batch.append_blocks("z", [4, 5, 6])
    assert batch.block_ids("z") == [4, 5, 6]


def test_requests_share_blocks(batch):
    batch.add_request("a", [1, 2, 3], 8)
    batch.add_request("b", [1, 2, 4], 8)
    assert batch.remove_request("a") == [1, 2, 3]


@pytest.mark.parametrize(
    ("full", "window", "computed", "text"),
    [
        ([0, 1, 2, 3, 4], [5, 6, 7], 17, NULL.format(0)),
        ([1, 2, 3, 4, 5], [0, 0, 7], 17, NULL.format(1)),
        ([1, 2, 3, 4, 5], [6, 7, 6], 17, TWICE.format(6, 0, 2)),
    ],
)
def test_what_a_group_says_of_its_window(grouped, full, window, computed, text):
    """The query of token 17 sees tokens 10 to 17: one block of 8 has passed, and none of a group without a window."""
    refused(grouped, lambda: grouped.add_request("z", {"full": full, "window": window}, computed), text)
    grouped.add_request("z", {"full": [1, 2, 3, 4, 5], "window": [0, 6, 7]}, 17)
    assert grouped.block_ids("z")["window"] == [0, 6, 7]


def test_a_replaced_block(grouped):
    grouped.add_request("z", {"full": [1, 2, 3, 4, 5], "window": [5, 6, 7]}, 17)
    before = core_state(grouped)
    for group, index in (("full", 0), ("window", 1), ("window", 2)):
        with pytest.raises(
            ValueError, match=f"^block_id: 0, the null block, but no window .* has passed block {index}"
        ):
            grouped.replace_block("z", index, 0, group)
    assert core_state(grouped) == before
    assert grouped.replace_block("z", 0, 0, "window") == 5


def test_a_replaced_block_that_the_request_has_already(grouped):
    """Block 0 stands wherever a window has passed, and blocks of other requests and groups are not this one's."""
    grouped.add_request("z", {"full": [1, 2, 3, 4, 5, 9], "window": [0, 0, 7]}, 23)
    grouped.add_request("y", {"full": [1, 2, 3], "window": [8, 6]}, 1)
    before = core_state(grouped)
    for group, index, block, at in (("full", 0, 2, 1), ("full", 5, 1, 0), ("full", 3, 9, 5), ("window", 1, 7, 2)):
        with pytest.raises(
            ValueError, match=rf"^block_id: {block} stands at index {at} of request 'z' already; give index {index} a"
        ):
            grouped.replace_block("z", index, block, group)
    assert core_state(grouped) == before
    assert grouped.replace_block("z", 2, 3, "full") == 3  # it stands there
    assert grouped.replace_block("z", 2, 8, "full") == 3
    assert grouped.replace_block("z", 2, 8, "window") == 7
    assert grouped.replace_block("z", 1, 0, "window") == 0
    assert grouped.block_ids("z") == {"full": [1, 2, 8, 4, 5, 9], "window": [0, 0, 8]}


def test_what_held_nulls_comes_back_after_a_roll_back(grouped):
    """A refused call restores rows with null blocks."""
    grouped.add_request("z", {"full": [1, 2, 3, 4, 5], "window": [0, 6, 7]}, 17)
    refused(grouped, lambda: grouped.append_blocks("z", {"full": [8], "window": [0]}), NULL.format(3))
    assert grouped.block_ids("z") == {"full": [1, 2, 3, 4, 5], "window": [0, 6, 7]}
