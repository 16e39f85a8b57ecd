"""``backend.move_slots``: tokens of a cache of any form go from slot to slot, all read before any is written."""

import pytest
import torch

from attncore import AttentionBackend, BackendConfig
from attncore.ops.move_slots import move_slots
from attncore.reference import ReferenceBackend
from attncore.reference.cache import copy_blocks

BLOCKS, BLOCK = 5, 4
MOVES = [[7, 6], [9, 7], [18, 8], [6, 9]]
"""A slot is left and filled, two change places through a third, and one move crosses blocks."""
CHAIN = [[1, 2], [2, 3], [3, 1]]
"""The same of blocks."""
CONFIGS = {
    "NHD": {},
    "HND": {"kv_cache_layout": "HND"},
    "short values": {"head_size_v": 4},
    "latent": {"num_kv_heads": 1, "head_size_v": 4, "use_mla": True},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "bfloat16": {"kv_cache_dtype": "bfloat16"},
}


def made(**config):
    config = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", "block_size": BLOCK} | config
    return ReferenceBackend(BackendConfig(**config))


def filled(backend):
    cache = backend.allocate_kv_cache(BLOCKS)
    numbers = torch.arange(cache.numel(), dtype=torch.float32).remainder(251).view(cache.shape)
    cache.copy_(numbers.to(cache.dtype))
    return cache


def rows(backend, cache):
    """Keys and values by slot, as numbers."""
    return [view.float().reshape(BLOCKS * BLOCK, -1).clone() for view in backend.kv_cache_views(cache)]


def moved(numbers, moves=MOVES):
    wanted = numbers.clone()
    for left, filled_slot in moves:
        wanted[filled_slot] = numbers[left]
    return wanted


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_tokens_of_every_layer_move(config, kind):
    backend = made(**config)
    caches = [filled(backend), filled(backend)]
    before = rows(backend, caches[0])
    backend.move_slots(caches, kind(MOVES))
    for cache in caches:
        for found, wanted in zip(rows(backend, cache), map(moved, before), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_cache_that_layers_have_together_moves_once(config):
    """Moves and copies in a chain, whose second turn would go on from where the first one has written."""
    backend = made(**config)
    for copies in (False, True):
        cache = filled(backend)
        before = [view.clone() for view in backend.kv_cache_views(cache)] if copies else rows(backend, cache)
        layers = [cache, cache.view(cache.shape)]
        if copies:
            backend.copy_blocks(layers, CHAIN)
        else:
            backend.move_slots(layers, MOVES)
        found = backend.kv_cache_views(cache) if copies else rows(backend, cache)
        for one, wanted in zip(found, before, strict=True):
            assert torch.equal(one.float(), moved(wanted, CHAIN if copies else MOVES).float())


def turned(cache):
    """The same elements, with strides of its own where an axis has one element."""
    strides = [step if size > 1 else 1 for step, size in zip(cache.stride(), cache.shape, strict=True)]
    return cache.as_strided(cache.shape, strides)


ONE_HEAD = {"num_kv_heads": 1}
FORMS = {
    "a pair of its halves": ({}, lambda backend, cache: backend.kv_cache_views(cache)),
    "a pair of its halves, HND": (CONFIGS["HND"], lambda backend, cache: backend.kv_cache_views(cache)),
    "a pair, rows of both": (CONFIGS["short values"], lambda backend, cache: backend.kv_cache_views(cache)),
    "a list": ({}, lambda backend, cache: list(backend.kv_cache_views(cache))),
    "bytes": (CONFIGS["fp8"], lambda backend, cache: cache.view(torch.uint8)),
    "a pair of bytes": (
        CONFIGS["fp8"], lambda backend, cache: tuple(part.view(torch.uint8) for part in backend.kv_cache_views(cache))
    ),
    "an axis of one head": (ONE_HEAD, lambda backend, cache: turned(cache)),
    "latent rows": (CONFIGS["latent"], lambda backend, cache: cache.view(cache.shape)),
}  # fmt: skip
"""The configuration, and the form in which a second layer has the cache of the first."""


class OfBase(ReferenceBackend):
    """A vendor's whose blocks the base class copies."""

    copy_blocks, swap_blocks = AttentionBackend.copy_blocks, AttentionBackend.swap_blocks


@pytest.mark.parametrize("method", ["move_slots", "copy_blocks"])
@pytest.mark.parametrize("kind", [ReferenceBackend, OfBase])
@pytest.mark.parametrize("form", FORMS)
def test_a_cache_that_layers_have_in_several_forms_moves_once(form, kind, method):
    config, other = FORMS[form]
    backend = kind(made(**config).config)
    cache, beside = filled(backend), filled(backend)
    before = [view.float().clone() for view in backend.kv_cache_views(cache)]
    for layers in ([cache, beside, other(backend, cache)], [other(backend, cache), cache]):
        for view, old in zip(backend.kv_cache_views(cache), before, strict=True):
            view.copy_(old)
        getattr(backend, method)(layers, MOVES if method == "move_slots" else CHAIN)
        for view, old in zip(backend.kv_cache_views(cache), before, strict=True):
            if method == "move_slots":
                wanted = moved(old.reshape(BLOCKS * BLOCK, -1)).view(old.shape)
            else:
                wanted = moved(old, CHAIN)
            assert torch.equal(view.float(), wanted)


@pytest.mark.parametrize("method", ["move_slots", "copy_blocks"])
@pytest.mark.parametrize("kind", [ReferenceBackend, OfBase])
@pytest.mark.parametrize("shared", ["keys", "blocks", "the first blocks"])
def test_caches_that_share_a_part_of_their_memory_are_refused(shared, kind, method):
    backend = kind(made().config)
    pool = torch.zeros(2, BLOCKS + 1, BLOCK, 2, 8)
    keys, values, more = pool[0, :BLOCKS], pool[1, :BLOCKS], torch.zeros(BLOCKS, BLOCK, 2, 8)
    layers = {
        "keys": [(keys, values), (keys, more)],
        "blocks": [pool[:, :-1], pool[:, 1:]],
        "the first blocks": [pool, pool[:, :-1]],
    }[shared]
    with pytest.raises(ValueError, match=r"^kv_caches: two of them share a part of their memory"):
        getattr(backend, method)(layers, [[1, 2]])


def test_layers_of_one_pool_are_apart():
    """Each block holds keys and values of three layers, whose ends enclose each other's."""
    backend = made()
    pool = torch.arange(BLOCKS * 3 * 2 * BLOCK * 2 * 8, dtype=torch.float32).view(BLOCKS, 3, 2, BLOCK, 2, 8)
    before = pool.clone()
    backend.copy_blocks([(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(3)], CHAIN)
    assert torch.equal(pool, moved(before, CHAIN))


def test_the_function_of_the_reference_takes_a_pair_beside_the_whole_cache():
    whole = torch.arange(2.0 * BLOCKS * BLOCK * 2 * 8).view(2, BLOCKS, BLOCK, 2, 8)
    before = whole.clone()
    copy_blocks([whole, (whole[0], whole[1])], CHAIN)
    for part, old in zip(whole, before, strict=True):
        assert torch.equal(part, moved(old, CHAIN))


class OfPairs(ReferenceBackend):
    """A vendor's: blocks are copied by the base class, which takes pairs of a latent cache, too."""

    copy_blocks, swap_blocks = AttentionBackend.copy_blocks, AttentionBackend.swap_blocks

    def kv_cache_views(self, kv_cache):
        return kv_cache if isinstance(kv_cache, tuple) else super().kv_cache_views(kv_cache)


@pytest.mark.parametrize("kind", [ReferenceBackend, OfPairs])
@pytest.mark.parametrize("config", ["NHD", "latent"])
def test_blocks_of_a_pair_are_read_before_any_is_written(config, kind):
    """The values of a latent cache are columns of its keys."""
    backend = kind(made(**CONFIGS[config]).config)
    for copies in (False, True):
        pair = backend.kv_cache_views(filled(backend))
        before = [view.clone() for view in pair]
        if copies:
            backend.copy_blocks([pair, pair], CHAIN)
        else:
            backend.swap_blocks(pair, pair, CHAIN)
        for view, old in zip(pair, before, strict=True):
            assert torch.equal(view, moved(old, CHAIN))


def test_a_pair_of_strided_views_moves_and_nothing_beside_it():
    """Layers of one pool: what lies between is another layer's."""
    backend = made()
    pool = torch.arange(BLOCKS * 3 * 2 * BLOCK * 2 * 8, dtype=torch.float32).view(BLOCKS, 3, 2, BLOCK, 2, 8)
    before = pool.clone()
    backend.move_slots([(pool[:, 1, 0], pool[:, 1, 1])], MOVES)
    assert torch.equal(pool[:, [0, 2]], before[:, [0, 2]])
    for part in (0, 1):
        by_slot = [one[:, 1, part].reshape(BLOCKS * BLOCK, -1).clone() for one in (before, pool)]
        assert torch.equal(by_slot[1], moved(by_slot[0]))


def test_bytes_of_an_engine_move():
    backend = made(kv_cache_dtype="fp8_e4m3")
    cache = filled(backend)
    before = rows(backend, cache)
    backend.move_slots([cache.view(torch.uint8)], MOVES)
    assert all(map(torch.equal, rows(backend, cache), map(moved, before)))


@pytest.mark.parametrize("moves", [[], torch.empty((0, 2), dtype=torch.int64)])
def test_no_moves_and_no_layers(moves):
    backend = made()
    cache = filled(backend)
    before = cache.clone()
    backend.move_slots([cache], moves)
    backend.move_slots([], MOVES)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ([[1, 20]], "moves: destination slot 20 is outside the cache's 20 slots"),
        ([[-1, 2]], "moves: source slot -1 is outside the cache's 20 slots"),
        ([[1, 3], [2, 3]], "moves: a destination is named twice; each slot can take one source only"),
        ([1, 2], r"moves: shape \(2,\) of int64 found; give integers of shape \(n, 2\)"),
        ([[1.0, 2.0]], "moves: shape .* of float64 found"),
    ],
)
def test_what_is_refused_changes_no_layer(moves, said):
    backend = made()
    caches = [filled(backend), filled(backend)]
    with pytest.raises(ValueError, match=f"^{said}"):
        backend.move_slots(caches, moves)
    assert all(torch.equal(cache, filled(backend)) for cache in caches)


def test_caches_that_cannot_be_moved_in_are_named():
    backend = made()
    good, pair = filled(backend), torch.zeros(1, BLOCK, 2, 8).expand(BLOCKS, -1, -1, -1)
    with pytest.raises(ValueError, match=r"^key_cache: strides .* an expanded tensor"):
        backend.move_slots([good, (pair, pair)], MOVES)
    assert torch.equal(good, filled(backend))

    class Beside(ReferenceBackend):
        def kv_cache_views(self, kv_cache):
            return super().kv_cache_views(kv_cache[:2])

    with pytest.raises(ValueError, match=r"^kv_caches: one holds .* override move_slots in Beside, which moves all"):
        Beside(backend.config).move_slots([torch.zeros(3, *good.shape[1:])], MOVES)


def test_the_function_takes_views_alone():
    backend = made()
    cache = filled(backend)
    before = rows(backend, cache)
    move_slots(*backend.kv_cache_views(cache), MOVES)
    assert all(map(torch.equal, rows(backend, cache), map(moved, before)))
