"""Keys and values of a cache as views with the same axes, whichever form and layout the cache has."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from attncore.abstract.backend_config import BackendConfig


def key_and_value_views(kv_cache: Any, config: BackendConfig, dtype: Any, block_axis: int) -> tuple[Tensor, Tensor]:
    """Views (blocks, block_size, num_kv_heads, head_size or head_size_v) of a whole cache, or of a pair, of ``dtype``.

    A whole cache has its blocks in ``block_axis``; the usual shapes of the layouts NHD and HND are known: keys and
    values stacked before or behind the blocks, in one row of each head, or latent rows. A pair is taken as it comes.
    Bytes are viewed as ``dtype`` where that is a float of a byte. ValueError naming ``kv_cache`` for anything else, and
    for what code that reads by address and stride finds other numbers of.
    """
    import torch

    from attncore.array_arguments import not_by_address  # it imports NumPy

    whole = isinstance(kv_cache, torch.Tensor)
    # Of a list three are read at most, whatever it says of its length.
    given = (kv_cache,) if whole else tuple(islice(kv_cache, 3)) if isinstance(kv_cache, (tuple, list)) else (None,)
    if not all(isinstance(part, torch.Tensor) for part in given):
        raise ValueError(f"kv_cache: {type(kv_cache).__name__} found; give a tensor, or a pair of them")
    for part in given:
        if (why := not_by_address(part)) is not None:
            raise ValueError(f"kv_cache: {why}")
    parts = [_floats(part, dtype) for part in given]
    size_v = config.head_size_v or config.head_size
    if whole:
        views = _of_whole(parts[0], config, size_v, block_axis)
    elif len(parts) != 2 or config.use_mla:
        views = None
    else:
        views = parts[0], parts[1]
    if views is None or not _fit(views, config, size_v):
        shapes = [tuple(part.shape) for part in given]
        own = "; a class with a layout of its own overrides kv_cache_views" if config.kv_cache_layout == "own" else ""
        wanted = (config.block_size, config.num_kv_heads, config.head_size)
        raise ValueError(
            f"kv_cache: shape {shapes[0] if whole else shapes} found for layout {config.kv_cache_layout}; expected the "
            f"tensor that allocate_kv_cache makes, or a pair of views (blocks, {', '.join(map(str, wanted))}) of keys "
            f"and values{f' ({size_v})' if size_v != config.head_size else ''}, contiguous in the last dimension{own}"
        )
    for part in parts:
        if part.dtype != dtype:
            raise ValueError(f"kv_cache: {part.dtype} found; the backend was made for {dtype}")
    return views


def _floats(part: Tensor, dtype: Any) -> Tensor:
    """``part``, as floats where an engine has allocated them as bytes."""
    import torch

    if not held_as_bytes(part, dtype):
        return part
    with torch.inference_mode(False):  # or a layer that keeps it could not write to it outside of that mode
        return part.view(dtype)


def held_as_bytes(part: Tensor, dtype: Any) -> bool:
    """Whether a part of a cache of ``dtype``, a float of a byte, was allocated as bytes."""
    import torch

    return part.dtype == torch.uint8 and dtype.itemsize == 1


def _of_whole(kv_cache: Tensor, config: BackendConfig, size_v: int, block_axis: int) -> tuple[Tensor, Tensor] | None:
    if config.use_mla:
        if kv_cache.dim() != 3:
            return None
        rows = kv_cache.unsqueeze(2)
        return rows, rows[..., :size_v]
    if kv_cache.dim() == 5 and block_axis in (0, 1) and kv_cache.shape[1 - block_axis] == 2:
        keys, values = kv_cache.unbind(1 - block_axis)
    elif kv_cache.dim() == 4 and block_axis == 0 and kv_cache.shape[3] == config.head_size + size_v:
        keys, values = kv_cache[..., : config.head_size], kv_cache[..., config.head_size :]
    else:
        return None
    if config.kv_cache_layout == "HND":
        return keys.transpose(1, 2), values.transpose(1, 2)
    return (keys, values) if config.kv_cache_layout == "NHD" else None


def _fit(views: tuple[Tensor, Tensor], config: BackendConfig, size_v: int) -> bool:
    inner = (config.block_size, config.num_kv_heads)
    return views[0].shape[:1] == views[1].shape[:1] and all(
        view.shape[1:] == (*inner, size) and (size == 1 or view.stride(3) == 1)
        for view, size in zip(views, (config.head_size, size_v), strict=True)
    )
