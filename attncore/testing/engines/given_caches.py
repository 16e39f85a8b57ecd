"""Caches as an engine of its own makes them: a pair of views into its pool, or bytes in place of fp8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attncore.testing.engines.blocks_first import as_integers
from attncore.testing.engines.cache_view import CacheView
from attncore.testing.harness.errors import ConformanceError

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, BackendConfig

Pair = tuple[Tensor, Tensor]


class GivenCache(NamedTuple):
    """A cache: what ``forward`` is handed, how its slots are seen, and a check of the memory around them."""

    kv_cache: Any
    view: CacheView
    check: Callable[[], None]


MakeCache = Callable[["AttentionBackend", int], GivenCache]
"""Makes a cache of so many blocks for a backend."""


def allocated(backend: AttentionBackend, num_blocks: int) -> GivenCache:
    """The backend's own."""
    kv_cache = backend.allocate_kv_cache(num_blocks)
    return GivenCache(kv_cache, CacheView(backend, kv_cache, num_blocks), lambda: None)


def as_bytes(backend: AttentionBackend, num_blocks: int) -> GivenCache:
    """The backend's own, its numbers as bytes."""
    made = allocated(backend, num_blocks)
    if isinstance(made.kv_cache, Tensor):
        return made._replace(kv_cache=made.kv_cache.view(torch.uint8))
    parts = (part.view(torch.uint8) if part.element_size() == 1 else part for part in made.kv_cache)
    return made._replace(kv_cache=tuple(parts))


def pair_of_views(form: str, *, bytes_only: bool = False) -> MakeCache:
    """What makes pairs of views of the form of that name; ``bytes_only``: as bytes. Memory beside them holds NaN, which
    has to stay.
    """

    def make(backend: AttentionBackend, num_blocks: int) -> GivenCache:
        config = backend.config
        count = num_blocks * config.block_size * config.num_kv_heads * 3 * (config.head_size + _size_v(config))
        dtype = backend.kv_cache_torch_dtype()
        nan = torch.full((), torch.nan).to(dtype) if dtype.is_floating_point else torch.tensor(0x7F, dtype=dtype)
        memory, inside = nan.repeat(count).to(config.device), torch.zeros(count, dtype=torch.bool)
        views = FORMS[form](memory, num_blocks, config)
        for part, mask in zip(views, FORMS[form](inside, num_blocks, config), strict=True):
            part.view(torch.uint8 if part.element_size() == 1 else part.dtype).zero_()
            mask.fill_(True)
        outside = ~inside
        before = as_integers(memory).cpu()[outside]

        def check() -> None:
            if not torch.equal(as_integers(memory).cpu()[outside], before):
                raise ConformanceError(
                    f"the cache was handed over as a pair of views ({form}), and memory beside them was written to"
                )

        offset = torch.arange(config.block_size)[:, None, None]
        view = CacheView(backend, views, num_blocks, [offset.expand(part.shape[1:]) for part in views])
        given = tuple(part.view(torch.uint8) for part in views) if bytes_only else views
        return GivenCache(given, view, check)

    return make


def _size_v(config: BackendConfig) -> int:
    return config.head_size_v or config.head_size


def _sizes(num_blocks: int, config: BackendConfig) -> tuple[int, int, int, int, int]:
    return num_blocks, config.block_size, config.num_kv_heads, config.head_size, _size_v(config)


def _in_a_pool_of_layers(memory: Tensor, num_blocks: int, config: BackendConfig) -> Pair:
    """Each block holds the keys and values of three layers; this is the second."""
    blocks, size, heads, key, value = _sizes(num_blocks, config)
    mine = memory.view(blocks, 3, -1)[:, 1]
    end = size * heads * key
    keys, values = mine[:, :end], mine[:, end : end + size * heads * value]
    return keys.view(blocks, size, heads, key), values.view(blocks, size, heads, value)


def _in_one_row(memory: Tensor, num_blocks: int, config: BackendConfig) -> Pair:
    """Heads before tokens, and a row holds a head's key and value."""
    blocks, size, heads, key, value = _sizes(num_blocks, config)
    rows = memory[: blocks * size * heads * (key + value)].view(blocks, heads, size, key + value).transpose(1, 2)
    return rows[..., :key], rows[..., key:]


def _apart(memory: Tensor, num_blocks: int, config: BackendConfig, *, heads_first: bool) -> Pair:
    blocks, size, heads, key, value = _sizes(num_blocks, config)
    inner = (heads, size) if heads_first else (size, heads)
    end, rows = blocks * size * heads * key, blocks * size * heads
    keys, values = memory[:end].view(blocks, *inner, key), memory[end : end + rows * value].view(blocks, *inner, value)
    return (keys.transpose(1, 2), values.transpose(1, 2)) if heads_first else (keys, values)


def _tokens_first(memory: Tensor, num_blocks: int, config: BackendConfig) -> Pair:
    return _apart(memory, num_blocks, config, heads_first=False)


def _heads_first(memory: Tensor, num_blocks: int, config: BackendConfig) -> Pair:
    return _apart(memory, num_blocks, config, heads_first=True)


FORMS: Mapping[str, Callable[[Tensor, int, BackendConfig], Pair]] = {
    "blocks apart": _in_a_pool_of_layers,
    "key and value in one row": _in_one_row,
    "tokens before heads": _tokens_first,
    "heads before tokens": _heads_first,
}
"""Name -> the views of keys and values (blocks, block_size, num_kv_heads, size) into flat memory, maybe larger."""
