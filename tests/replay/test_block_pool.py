"""Blocks by hand: who holds them, what is found again, what is given up."""

import pytest

from attncore.replay.scheduling.block_pool import BlockPool


def test_block_0_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match=r"count: 1 block asked, 0 of 4 are free"):
        pool.allocate(1)


def test_a_pool_of_the_null_block_alone_is_refused():
    with pytest.raises(ValueError, match="num_blocks: 1"):
        BlockPool(1)


def test_a_released_block_is_used_before_a_fresh_one():
    pool = BlockPool(10)
    first = pool.allocate(2)
    pool.release(first)
    assert sorted(pool.allocate(2)) == sorted(first)
    assert pool.allocate(1) == [3]


def test_a_published_block_is_found_while_held_and_after():
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    assert pool.lookup(["a"]) == []
    pool.publish(block, "a")
    assert pool.lookup(["a"]) == [block]
    assert pool.num_free_among([block]) == 0
    pool.release([block])
    assert pool.lookup(["a"]) == [block]
    assert (pool.num_free, pool.num_free_among([block])) == (3, 1)


def test_lookup_ends_at_the_first_key_that_is_not_there():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, "acd", strict=True):
        pool.publish(block, key)
    assert pool.lookup("abcd") == blocks[:1]


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.publish(block, "a")
    pool.hold([block])
    pool.release([block])
    assert pool.num_free == 1
    assert pool.allocate(1) == [2]
    pool.release([block])
    assert pool.num_free == 1


def test_the_prompt_unused_for_longest_is_forgotten_first_and_its_tail_before_its_head():
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, key in zip(old + new, "abcd", strict=True):
        pool.publish(block, key)
    pool.release(new)
    pool.release(old)
    pool.hold(new)  # used again, and released last
    pool.release(new)
    given = [pool.allocate(1)[0] for _ in range(4)]
    assert given == [old[1], old[0], new[1], new[0]]
    assert [pool.lookup([key]) for key in "abcd"] == [[], [], [], []]


def test_blank_and_fresh_blocks_go_before_cached_ones():
    pool = BlockPool(4)
    cached, blank = pool.allocate(2)
    pool.publish(cached, "a")
    pool.release([cached, blank])
    assert pool.allocate(2) == [blank, 3]
    assert pool.lookup(["a"]) == [cached]


def test_the_first_of_two_equal_prompts_stays_published():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, "a")
    pool.publish(second, "a")
    assert pool.lookup(["a"]) == [first]
    pool.release([second])  # it has no key: it is blank, and goes first
    assert pool.allocate(1) == [second]
