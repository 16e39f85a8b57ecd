"""The cache: its shape, which elements a slot owns, and moving blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attncore.quoted import quoted
from attncore.show import counted
from attncore.testing.engines.blocks_first import block_views
from attncore.testing.engines.cache_view import CacheView
from attncore.testing.engines.moved_caches import (
    check_copied_blocks,
    check_moved_slots,
    check_swapped_blocks,
    moves_slots,
)
from attncore.testing.engines.run_batches import run_with_a_copied_block
from attncore.testing.harness.covers import covers
from attncore.testing.harness.crossed import named, require_declared
from attncore.testing.harness.errors import ConformanceError, UnsupportedError
from attncore.testing.harness.subject import Subject
from attncore.vocabulary import DTYPES, KV_CACHE_DTYPES, KV_CACHE_LAYOUTS

__all__ = [
    "test_a_request_reads_a_copied_block",
    "test_a_slot_owns_its_part_of_its_block",
    "test_blocks_are_copied_and_swapped_in_a_layout",
    "test_blocks_are_copied_and_swapped_in_each_dtype",
    "test_blocks_are_copied_within_caches",
    "test_blocks_are_swapped_to_another_cache",
    "test_slots_are_moved_within_caches",
    "test_the_cache_is_zeroed_and_has_the_blocks_asked_for",
    "test_the_cache_shape_grows_along_one_axis",
]


@covers("cache shape", apart=True)
def test_the_cache_shape_grows_along_one_axis(attncore_subject: Subject) -> None:
    """``kv_cache_shape`` gives positive integers, one of which, and only one, is proportional to ``num_blocks``."""
    backend = attncore_subject.backend()
    config = backend.config
    sizes = (config.block_size, config.num_kv_heads, config.head_size)
    shapes = [tuple(backend.kv_cache_shape(count, *sizes)) for count in (1, 2, 7)]
    for shape in shapes:
        if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConformanceError(f"kv_cache_shape gave {quoted(shape)}, which is not a tuple of positive integers")
    one, two, seven = shapes
    grown = [axis for axis, size in enumerate(one) if (two[axis], seven[axis]) != (size, size)]
    if len(one) != len(seven) or len(grown) != 1:
        raise ConformanceError(f"kv_cache_shape gave {one}, {two}, {seven} for 1, 2 and 7 blocks: one axis must grow")
    axis = grown[0]
    if (two[axis], seven[axis]) != (2 * one[axis], 7 * one[axis]):
        raise ConformanceError(f"kv_cache_shape gave {one}, {two}, {seven}: axis {axis} is no multiple of num_blocks")


@covers("cache shape", apart=True)
def test_the_cache_is_zeroed_and_has_the_blocks_asked_for(attncore_subject: Subject) -> None:
    """``allocate_kv_cache`` gives the blocks asked for, zeros, of the stated dtype, on the backend's device."""
    backend = attncore_subject.backend()
    parts = block_views(backend, backend.allocate_kv_cache(5), 5)
    device = torch.device(backend.config.device)
    for part in parts:
        if bool((part.view(torch.uint8) if part.element_size() == 1 else part).count_nonzero()):
            raise ConformanceError("allocate_kv_cache must give zeros: some kernels multiply unused rows by 0")
        if part.device != device:
            raise ConformanceError(f"the cache is on {part.device}, the backend was made for {device}")


@covers("cache shape", apart=True)
def test_a_slot_owns_its_part_of_its_block(attncore_subject: Subject) -> None:
    """Writing one token changes elements of one block only, as many for every token, and room for a key and a value."""
    backend = attncore_subject.backend()
    config = backend.config
    elements = CacheView(backend, backend.allocate_kv_cache(2), 2).elements_of_a_token
    values = 0 if config.use_mla else config.head_size_v or config.head_size  # latent ones are a part of the keys
    wanted = config.num_kv_heads * (config.head_size + values)
    if elements < wanted:
        raise ConformanceError(
            f"a token owns {counted(elements, 'element')} of its block; its key and value need {wanted}"
        )


@covers("copy and swap of blocks")
def test_blocks_are_copied_within_caches(attncore_subject: Subject) -> None:
    """``copy_blocks`` copies whole blocks in every cache given, once in one that several layers have; all are read
    before any is written."""
    check_copied_blocks(attncore_subject.backend())


@covers("copy and swap of blocks")
def test_slots_are_moved_within_caches(attncore_subject: Subject) -> None:
    """``move_slots`` does so with tokens, where ``tree_mask`` is declared or the class has a method of its own."""
    check_moved_slots(attncore_subject.backend())


@covers("copy and swap of blocks")
def test_blocks_are_swapped_to_another_cache(attncore_subject: Subject) -> None:
    """``swap_blocks`` copies blocks to another cache and leaves the source as it was."""
    check_swapped_blocks(attncore_subject.backend())


@covers("copy and swap of blocks")
@pytest.mark.parametrize("layout", KV_CACHE_LAYOUTS)
def test_blocks_are_copied_and_swapped_in_a_layout(attncore_subject: Subject, layout: str) -> None:
    """The same in each layout, with a cache of each dtype; of tokens, too, where they are moved."""
    require_declared(layout, attncore_subject.form.kv_cache_layouts)
    for kv_cache_dtype in KV_CACHE_DTYPES:
        if kv_cache_dtype in attncore_subject.form.kv_cache_dtypes:
            what = f"layout {layout} and cache {kv_cache_dtype}"
            _check_all(attncore_subject, what, kv_cache_layout=layout, kv_cache_dtype=kv_cache_dtype)


@covers("copy and swap of blocks")
def test_blocks_are_copied_and_swapped_in_each_dtype(attncore_subject: Subject) -> None:
    """The same for models of each dtype, whose caches have it."""
    for dtype in DTYPES:
        if dtype in attncore_subject.form.dtypes:
            _check_all(attncore_subject, f"dtype {dtype}", dtype=dtype)


def _check_all(subject: Subject, what: str, **changes: Any) -> None:
    with named(what):
        try:
            backend = subject.backend(**changes)
        except UnsupportedError:  # declared, but not together
            return
        check_copied_blocks(backend)
        check_swapped_blocks(backend)
        if moves_slots(backend):
            check_moved_slots(backend)


@covers("copy and swap of blocks")
def test_a_request_reads_a_copied_block(attncore_subject: Subject) -> None:
    """A request whose block was copied and replaced goes on with the copy."""
    attncore_subject.require_phase("decode")
    run_with_a_copied_block(attncore_subject.backend())
