"""Several KV-cache groups: a pool each, prefixes that all of them know, blocks that windows have passed."""

import pytest

from attncore.builder import KVCacheGroup
from attncore.replay.scheduling.kv_cache_manager import CacheBlocks, check_pools
from attncore.replay.traces.trace import Request

FULL, WINDOW, WIDE = KVCacheGroup("full", 4), KVCacheGroup("window", 2, sliding_window=3), KVCacheGroup("wide", 6)


def computed(cache, request, tokens):
    """The request after ``tokens`` tokens."""
    running = cache.running(request)
    assert cache.admit(running, alone=True)
    running.computed = tokens
    cache.publish(running)
    return running


def test_each_group_has_blocks_for_the_goal_from_a_pool_of_its_own():
    cache = CacheBlocks([FULL, WINDOW], 20)
    running = computed(cache, Request(1, 0, 9, 4), 0)
    assert running.tables == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert running.room == 10
    assert cache.grow(running, 11) == [[], [6]]
    assert cache.grow(running, 13) == [[4], [7]]
    assert [pool.num_free for pool in cache.pools] == [15, 12]
    cache.release(running)
    assert [pool.num_free for pool in cache.pools] == [19, 19]


def test_too_few_blocks_in_one_group_change_nothing():
    cache = CacheBlocks([FULL, WINDOW], 6)
    running = computed(cache, Request(1, 0, 9, 4), 0)
    assert cache.grow(running, 12) is None  # the windowed group has no sixth block
    assert running.tables == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert not cache.admit(cache.running(Request(2, 0, 2, 1)), alone=False)
    assert [pool.num_free for pool in cache.pools] == [2, 0]


def test_a_window_gives_up_what_the_next_query_does_not_see():
    cache = CacheBlocks([FULL, WINDOW], 20)
    running = computed(cache, Request(1, 0, 9, 4), 5)  # token 5 sees 3, 4, 5
    assert cache.pass_windows(running) == {"window": [1]}
    assert running.tables == [[1, 2, 3], [0, 2, 3, 4, 5]]
    assert cache.pass_windows(running) == {}
    running.computed = 9  # token 9 sees 7, 8, 9
    assert cache.pass_windows(running) == {"window": [2, 3]}
    assert cache.pools[1].num_free == 19 - 2
    cache.release(running)
    assert cache.pools[1].num_free == 19


def test_a_prefix_is_reused_as_far_as_all_groups_know_what_the_next_query_sees():
    cache = CacheBlocks([FULL, WINDOW], 20)
    first = computed(cache, Request(1, 0, 12, 1, (7,)), 12)
    assert cache.pass_windows(first) == {"window": [1, 2, 3, 4, 5]}
    second = cache.running(Request(2, 0, 12, 1, (7,)))
    assert cache.admit(second, alone=False)
    # 8 tokens and not 12: one has to be computed. Token 8 sees 6, 7, 8, which is block 3 of the windowed group.
    assert second.computed == 8
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[1][:4] == [0, 0, 0, 4]
    assert second.published == [2, 4]


def test_a_windowed_group_that_has_forgotten_ends_the_prefix():
    cache = CacheBlocks([FULL, WINDOW], 9)
    first = computed(cache, Request(1, 0, 12, 1, (7,)), 12)
    cache.pass_windows(first)
    other = computed(cache, Request(2, 0, 8, 1), 0)  # takes three blocks that the window has passed
    assert other.tables[1] == [7, 8, 5, 4]
    second = cache.running(Request(3, 0, 12, 1, (7,)))
    tokens, known = cache._known_prefix(second)
    assert (tokens, known) == (4, [[1], [0, 2]])


def test_a_prefix_ends_where_a_block_of_every_group_ends():
    cache = CacheBlocks([FULL, WIDE], 20)
    computed(cache, Request(1, 0, 40, 1, (7,)), 40)
    second = cache.running(Request(2, 0, 40, 1, (7,)))
    assert cache.admit(second, alone=False)
    assert second.computed == 36  # 40 tokens are ten blocks of one and six of the other


def test_windowed_groups_alone():
    cache = CacheBlocks([WINDOW], 20)
    first = computed(cache, Request(1, 0, 9, 1, (7,)), 9)
    cache.release(first)
    second = cache.running(Request(2, 0, 9, 1, (7,)))
    assert cache.admit(second, alone=True)
    assert (second.computed, second.tables) == (8, [[0, 0, 0, 4, 5]])


def test_a_request_that_can_never_run_names_the_group_it_lacks_blocks_in():
    with pytest.raises(
        ValueError, match=r"^num_blocks: row 1 .* needs 6 blocks of 2 of group 'window'; --num-blocks 6"
    ):
        check_pools([Request(1, 0, 10, 3)], 6, [FULL, WINDOW])
    check_pools([Request(1, 0, 10, 3)], 7, [FULL, WINDOW])
