"""``copy_blocks`` and ``move_slots`` over the caches of several layers, some of which have one together; and
``swap_blocks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.abstract import AttentionBackend
from attncore.testing.engines.blocks_first import as_integers
from attncore.testing.engines.cache_view import CacheView
from attncore.testing.harness.errors import ConformanceError, UnsupportedError

if TYPE_CHECKING:
    import numpy.typing as npt

Pairs = Sequence[tuple[int, int]]
NUM_BLOCKS = 6
CODES = 251  # of a byte, and so of any element, 0 apart
NAMES = ("that layers 0, 2 and 3 have together", "of layer 1")


def check_copied_blocks(backend: AttentionBackend) -> None:
    """ConformanceError unless ``copy_blocks`` copies in every cache once, a chain, a swap, and in either order."""
    for pairs in _orders([(1, 2), (2, 3), (5, 0), (0, 5)]):
        _check(backend, "copy_blocks", "block", pairs)


def check_swapped_blocks(backend: AttentionBackend) -> None:
    """ConformanceError unless ``swap_blocks`` copies blocks to another cache, and leaves the source as it was."""
    source, target = backend.allocate_kv_cache(6), backend.allocate_kv_cache(4)
    left, right = _numbered(backend, source, 6), CacheView(backend, target, 4)
    backend.swap_blocks(source, target, np.array([(5, 0), (1, 3)]))
    _check_blocks(left, {block: block for block in range(6)}, "the source after swap_blocks")
    _check_blocks(right, {0: 5, 3: 1}, "swap_blocks of (5, 0), (1, 3)")


def check_moved_slots(backend: AttentionBackend) -> None:
    """The same of ``move_slots``, whose moves cross blocks. UnsupportedError where the spec declares no ``tree_mask``
    and the class has no ``move_slots`` of its own.
    """
    if not moves_slots(backend):
        raise UnsupportedError("its spec does not declare tree_mask")
    size = backend.config.block_size
    last = NUM_BLOCKS * size - 1
    for moves in _orders([(size - 1, size), (size, size + 1), (last, 3 * size), (3 * size, last)]):
        _check(backend, "move_slots", "slot", moves)


def moves_slots(backend: AttentionBackend) -> bool:
    """Whether tokens are moved: of draft trees, or by a method of the backend's own."""
    declared = backend.spec is not None and "tree_mask" in backend.spec.features
    return declared or type(backend).move_slots is not AttentionBackend.move_slots


def _orders(pairs: Pairs) -> list[Pairs]:
    return [pairs, pairs[::-1]]


def _check(backend: AttentionBackend, method: str, unit: str, pairs: Pairs) -> None:
    """Every element that a token owns holds its slot's code; afterwards each holds the right one, by all its bits."""
    caches = [backend.allocate_kv_cache(NUM_BLOCKS) for _ in NAMES]
    views = [CacheView(backend, kv_cache, NUM_BLOCKS) for kv_cache in caches]
    size = 1 if unit == "slot" else backend.config.block_size
    wanted = []
    for number, view in enumerate(views):
        codes = 1 + (7 * np.arange(NUM_BLOCKS * view.block_size) + 100 * number) % CODES
        for part, filled in zip(view.parts, _filled(view, codes), strict=True):
            as_integers(part).copy_(filled)
        after = codes.copy()
        for source, target in pairs:
            after[target * size : (target + 1) * size] = codes[source * size : (source + 1) * size]
        wanted.append(after)
    getattr(backend, method)([*caches, caches[0], _another_object(caches[0])], np.array(pairs, dtype=np.int64))
    for name, view, after in zip(NAMES, views, wanted, strict=True):
        for part, right, owner in zip(view.parts, _filled(view, after), view.owners, strict=True):
            wrong = (as_integers(part) != right).cpu().nonzero()
            if len(wrong):
                block, *element = wrong[0].tolist()
                place = block if unit == "block" else block * view.block_size + int(owner[tuple(element)])
                source = next((source for source, target in pairs if target == place), place)
                raise ConformanceError(
                    f"{method} of {', '.join(map(str, pairs))} in the caches of four layers: {unit} {place} should "
                    f"hold what {unit} {source} held, in the cache {name}: every cache once, however many layers have "
                    "it, and all is read before any is written"
                )


def _filled(view: CacheView, codes: npt.NDArray[np.int64]) -> list[Tensor]:
    """The parts of a cache as integers, whose tokens hold the codes of their slots; other elements are as they are."""
    by_block = torch.from_numpy(codes).view(view.num_blocks, view.block_size)
    found = []
    for part, owner in zip(view.parts, view.owners, strict=True):
        held = as_integers(part)
        new = by_block[:, owner.clamp(min=0)].to(held.device, held.dtype)
        found.append(torch.where((owner >= 0).to(held.device), new, held))
    return found


def _another_object(kv_cache: Any) -> Any:
    """The same cache as another layer may have it: other tensors, of the same memory."""
    if isinstance(kv_cache, Tensor):
        return kv_cache.view(kv_cache.shape)
    return tuple(part.view(part.shape) for part in kv_cache)


def _numbered(backend: AttentionBackend, kv_cache: Any, num_blocks: int) -> CacheView:
    """The cache with every element of block i at i + 1."""
    view = CacheView(backend, kv_cache, num_blocks)
    for block in range(num_blocks):
        where = np.zeros((num_blocks, view.block_size), dtype=np.bool_)
        where[block] = True
        view.fill(where, block + 1.0)
    return view


def _check_blocks(view: CacheView, expected: dict[int, int], what: str) -> None:
    for part, owner in zip(view.parts, view.owners, strict=True):
        for block, number in expected.items():
            found = part[block].cpu().float()[owner >= 0]  # floats first: older releases of torch index no fp8
            if not bool((found == number + 1).all()):
                raise ConformanceError(f"{what}: block {block} should hold what block {number} held")
