"""Keys and values as a function of content, position and layer."""

import numpy as np
import pytest

from attncore.replay.token_content import Content, content_ids, own_content
from attncore.replay.traces.trace import Request


@pytest.fixture(scope="module")
def content():
    return Content(4, 2, 8, seed=0)


def int64(*numbers):
    return np.array(numbers, dtype=np.int64)


def test_shapes_and_dtype(content):
    query, key, value = content.tokens(int64(1, 2, 3), int64(0, 1, 2), 0)
    assert (query.shape, key.shape, value.shape) == ((3, 4, 8), (3, 2, 8), (3, 2, 8))
    assert {part.dtype for part in (query, key, value)} == {np.dtype(np.float32)}


def test_a_token_does_not_depend_on_its_neighbours(content):
    together = content.tokens(int64(1, 2, 3), int64(5, 6, 7), 1)
    alone = content.tokens(int64(2), int64(6), 1)
    assert all((one[0] == many[1]).all() for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize(("identity", "position", "layer"), [(4, 6, 1), (2, 7, 1), (2, 6, 0)])
def test_content_position_and_layer_all_count(content, identity, position, layer):
    one = content.tokens(int64(2), int64(6), 1)
    other = content.tokens(int64(identity), int64(position), layer)
    assert all((a != b).any() for a, b in zip(one, other, strict=True))


def test_the_seed_settles_it():
    ids, positions = int64(1, 2), int64(3, 4)
    first, again, other = (Content(2, 1, 4, seed).tokens(ids, positions, 0)[1] for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_tokens_differ_and_are_normal(content):
    positions = np.arange(20_000, dtype=np.int64)
    _, key, _ = content.tokens(np.full(20_000, 3, dtype=np.int64), positions, 0)
    assert len(np.unique(key.reshape(20_000, -1), axis=0)) > 19_500
    assert abs(key.mean()) < 0.05
    assert abs(key.std() - 1) < 0.05


def test_prompts_have_the_content_of_their_ids_and_the_rest_is_their_own():
    request = Request(5, 0, 600, 10, (8, 9))
    own = own_content(5)
    assert own == 11
    assert content_ids(request, 511, 514).tolist() == [16, 18, 18]
    assert content_ids(request, 599, 602).tolist() == [18, own, own]
    assert content_ids(request, 605, 606).tolist() == [own]
    assert content_ids(Request(5, 0, 600, 10), 0, 2).tolist() == [own, own]
