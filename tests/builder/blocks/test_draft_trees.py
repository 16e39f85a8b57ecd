"""Masks and depths of draft trees, parents and paths, against walking up each token's parents."""

import numpy as np
import pytest

from attncore.builder.blocks.draft_trees import checked_parents, checked_path, masks_and_depths


def random_tree(random, drafts):
    return np.array([random.integers(-1, draft) if draft else -1 for draft in range(drafts)], np.int32)


def walked(parents, token):
    """The tokens from ``token`` up to the root: token 0 is the root, draft i is token i + 1."""
    found = [token]
    while found[-1]:
        found.append(int(parents[found[-1] - 1]) + 1)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_masks_and_depths_are_those_of_a_walk(seed):
    random = np.random.default_rng(seed)
    trees = [random_tree(random, int(random.integers(0, 64))) for _ in range(5)]
    trees.append(np.arange(-1, 62, dtype=np.int32))  # the longest chain, whose last bit is the sign
    masks, depths = masks_and_depths(trees)
    assert (masks.dtype, depths.dtype) == (np.int64, np.int64)
    at = 0
    for parents in trees:
        for token in range(len(parents) + 1):
            path = walked(parents, token)
            assert int(masks[at]) & (2**64 - 1) == sum(1 << one for one in path)
            assert depths[at] == len(path) - 1
            at += 1
    assert at == len(masks) == len(depths)


def test_no_tree_and_a_tree_of_a_root_alone():
    assert [array.tolist() for array in masks_and_depths([])] == [[], []]
    assert [array.tolist() for array in masks_and_depths([np.empty(0, np.int32)] * 2)] == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ([0], "draft 0 of request 'a' has parent 0; give an earlier draft's index, or -1"),
        ([-1, 0, 2], "draft 2 of request 'a' has parent 2"),
        ([-1, -2], "draft 1 of request 'a' has parent -2"),
        ([-1] * 64, "64 drafts of request 'a'; a tree has at most 63"),
        ([[-1]], r"parents of request 'a': int64\[1, 1\] found; give integers in one row"),
        (np.array([-1.0]), r"parents of request 'a': float64\[1\] found"),
        ([-1.0], "parents of request 'a': item 0: -1.0 is not an integer"),
        ([-1, True], "parents of request 'a': item 1: True is not an integer"),
        ([-1, np.bool_(False)], f"parents of request 'a': item 1: {np.False_!r} is not an integer"),
        ([-1, 2**64], "draft 1 of request 'a' has parent 18446744073709551616"),
        ("abc", "parents of request 'a'"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents, said):
    with pytest.raises((TypeError, ValueError), match=f"^trees: {said}"):
        checked_parents("a", parents)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ([2], "draft 2 of request 'a' follows the root, but its parent is 0; give the drafts of one path"),
        ([0, 1], "draft 1 of request 'a' follows draft 0, but its parent is -1"),
        ([2, 0], "draft 2 of request 'a' follows the root"),
        ([0, 0], "draft 0 of request 'a' follows draft 0"),
        ([4], "draft 4 of request 'a', whose tree has 4 drafts"),
        ([-1], "draft -1 of request 'a'"),
        ([[0]], r"of request 'a': int64\[1, 1\] found"),
        ([0.0], "of request 'a': item 0: 0.0 is not an integer"),
    ],
)
def test_paths_that_are_none_are_refused(path, said):
    parents = checked_parents("a", [-1, -1, 0, 2])
    with pytest.raises((TypeError, ValueError), match=f"^paths: {said}"):
        checked_path("a", path, parents)
    for given in ([0, 2, 3], (0, np.uint64(2), np.int8(3)), np.array([0, 2, 3], np.uint8)):
        assert checked_path("a", given, parents) == [0, 2, 3]
    assert checked_path("a", [], parents) == []
