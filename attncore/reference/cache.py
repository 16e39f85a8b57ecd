"""The paged KV cache, in torch: layout, allocation, writing through the slot mapping, moving blocks.

Layout ``NHD`` is one tensor ``[2, num_blocks, block_size, num_kv_heads, head_size]``: ``[0]`` holds keys, ``[1]``
values. Layout ``HND`` has ``num_kv_heads`` before ``block_size``. A token of a slot below 0 (padding, masked tokens) is
not written, on a device too without asking it for anything.

Where values have a size of their own, keys and values share a row: ``[num_blocks, block_size, num_kv_heads, head_size
+ head_size_v]``. A *latent* cache (MLA) has one row a token and no head, in either layout: ``[num_blocks, block_size,
head_size]``, of which the first ``head_size_v`` columns are the values.

An fp8 cache holds what was written divided by a scale, and cut off at the largest number of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attncore.arguments import check_value_size, integer, optional_integer
from attncore.array_arguments import block_pairs as block_pairs_of
from attncore.array_arguments import not_strided
from attncore.ops.cache_writer import LARGEST
from attncore.ops.cache_writer_checks import (
    are_one,
    check_devices,
    check_last_slot,
    check_pair,
    check_slots,
    check_tensors,
)
from attncore.ops.distinct_caches import distinct_caches
from attncore.ops.written_tensor import check_strided, check_written, overwrites
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The layouts that this module makes and reads.
LAYOUTS = ("NHD", "HND")

#: ``kv_cache_dtype`` values that need no scales; ``auto`` is the model's dtype.
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")

#: ``kv_cache_dtype`` values that have scales.
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

Caches = Tensor | Sequence[Tensor]
Scale = float | Tensor
"""What an fp8 cache's numbers are times: one number, or a float32 tensor (1,) or (num_kv_heads,) on the device."""


def cache_dtype(kv_cache_dtype: str, dtype: str) -> torch.dtype:
    """The torch dtype of a cache: ``kv_cache_dtype``, or the model's ``dtype`` where that is ``auto``."""
    if kv_cache_dtype in FP8_DTYPES:
        return FP8_DTYPES[kv_cache_dtype]
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype: {quoted(kv_cache_dtype)} is not supported here; choose one of "
            f"{', '.join((*CACHE_DTYPES, *FP8_DTYPES))}"
        )
    name = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    found = getattr(torch, name, None)
    if name not in CACHE_DTYPES[1:] or not isinstance(found, torch.dtype):
        raise ValueError(f"dtype: {quoted(name)} is not supported here; choose one of {', '.join(CACHE_DTYPES[1:])}")
    return found


def cache_shape(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    layout: str = "NHD",
    *,
    head_size_v: int | None = None,
    use_mla: bool = False,
) -> tuple[int, ...]:
    """``(2, num_blocks, block_size, num_kv_heads, head_size)``; of layout ``HND`` heads come before ``block_size``.

    ``(num_blocks, block_size, num_kv_heads, head_size + head_size_v)`` where the values' size differs, and
    ``(num_blocks, block_size, head_size)`` for a latent cache (``use_mla``, one head).
    """
    _check_layout(layout)
    num_blocks = integer("num_blocks", num_blocks, 1, 2**63 - 1)
    block_size = integer("block_size", block_size, 1)
    num_kv_heads = integer("num_kv_heads", num_kv_heads, 1)
    head_size = integer("head_size", head_size, 1)
    head_size_v = optional_integer("head_size_v", head_size_v, 1)
    check_value_size(head_size, head_size_v, num_kv_heads, use_mla)
    if use_mla:
        return (num_blocks, block_size, head_size)
    inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    if head_size_v is not None and head_size_v != head_size:
        return (num_blocks, *inner, head_size + head_size_v)
    return (2, num_blocks, *inner, head_size)


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {quoted(layout)} is not supported here; choose one of {', '.join(LAYOUTS)}")


def allocate(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    layout: str = "NHD",
    head_size_v: int | None = None,
    use_mla: bool = False,
) -> Tensor:
    """A zeroed cache of ``num_blocks`` blocks on ``device``."""
    shape = cache_shape(
        num_blocks, block_size, num_kv_heads, head_size, layout, head_size_v=head_size_v, use_mla=use_mla
    )
    return torch.zeros(shape, dtype=dtype, device=device)


def key_value(kv_cache: Caches, head_size_v: int | None = None, layout: str = "NHD") -> tuple[Tensor, Tensor]:
    """Key cache and value cache, ``[blocks, block_size, num_kv_heads, head_size]`` (values: ``head_size_v``), as views.

    ``kv_cache`` is what ``allocate`` gives for ``layout``, or a pair of views with these axes, whatever the layout.
    ``head_size_v`` says where the values lie in a row that they share with the keys, and in a latent one, whose single
    head has all its columns as values where it is None.
    """
    _check_layout(layout)
    head_size_v = optional_integer("head_size_v", head_size_v, 1)
    if isinstance(kv_cache, Tensor):
        size, values = kv_cache.shape[-1] if kv_cache.dim() else 0, head_size_v
        if layout == "HND" and kv_cache.dim() in (4, 5):
            kv_cache = kv_cache.transpose(-3, -2)
        if kv_cache.dim() == 5 and kv_cache.shape[0] == 2 and values in (None, size):
            return kv_cache[0], kv_cache[1]
        if kv_cache.dim() == 4 and values is not None and 0 < values < size:
            return kv_cache[..., : size - values], kv_cache[..., size - values :]
        if kv_cache.dim() == 3 and (values is None or 0 < values <= size):
            rows = kv_cache.unsqueeze(2)
            return rows, rows[..., :values]
        wanted = "" if head_size_v is None else f" for head_size_v {head_size_v}"
        raise ValueError(
            f"kv_cache: shape {tuple(kv_cache.shape)} found{wanted}; expected (2, num_blocks, block_size, "
            " num_kv_heads, head_size), a pair of caches, (num_blocks, block_size, num_kv_heads, head_size "
            "+ head_size_v), or (num_blocks, block_size, head_size) for a latent cache"
        )
    _check_tensors("kv_cache", kv_cache)
    if len(kv_cache) != 2 or any(cache.dim() != 4 for cache in kv_cache):
        shapes = [tuple(cache.shape) for cache in kv_cache]
        raise ValueError(
            f"kv_cache: shapes {shapes} found; expected a pair (blocks, block_size, num_kv_heads, head_size)"
        )
    return kv_cache[0], kv_cache[1]


def _check_tensors(name: str, caches: Any) -> None:
    """ValueError unless ``caches`` is a list or a tuple of tensors."""
    if not isinstance(caches, Sequence) or not all(isinstance(cache, Tensor) for cache in caches):
        given = isinstance(caches, Sequence) and not isinstance(caches, str | bytes)
        found = [type(cache).__name__ for cache in caches[:3]] if given else type(caches).__name__
        raise ValueError(f"{name}: {found} found; give a tensor, or a pair of them")


def held(numbers: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
    """Keys or values ``(..., num_kv_heads, size)`` as a cache of ``dtype`` holds them.

    In fp8 they are divided by ``scale`` in float32 and cut off at the largest number; another cache has no scale.
    """
    if dtype not in LARGEST:
        return numbers.to(dtype)
    largest = LARGEST[dtype]
    return (numbers.float() / _of_heads(scale)).clamp(-largest, largest).to(dtype)


def restored(numbers: Tensor, scale: Scale) -> Tensor:
    """What a cache holds, ``(..., num_kv_heads, size)``, in float32: what was written, but for the rounding."""
    return numbers.float() * _of_heads(scale) if numbers.dtype in LARGEST else numbers.float()


def _of_heads(scale: Scale) -> Scale:
    return scale if isinstance(scale, float) else scale.view(-1, 1)


def as_indexed(cache: Tensor) -> Tensor:
    """The cache, of fp8 as bytes: torch indexes no fp8."""
    return cache.view(torch.uint8) if cache.dtype in LARGEST else cache


def as_floats(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, for bytes that an engine has allocated; any other cache as it is."""
    return cache.view(dtype) if cache.dtype == torch.uint8 else cache


def write(
    key: Tensor,
    value: Tensor | None,
    kv_cache: Caches,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Store this step's keys and values ``(num_tokens, num_kv_heads, head_size)`` in their slots, in place.

    Of a latent cache ``key`` is the rows ``(num_tokens, 1, head_size)``, and ``value`` is not read. ``slot_mapping``
    is int64 ``(num_tokens,)``, and all tensors are on one device; a token of a slot below 0 is not written. Values are
    converted to the cache's dtype, of an fp8 cache as ``held`` says. ``layout`` is of a whole cache. Nothing
    synchronises, so the call may be captured in a CUDA graph.

    Raises ValueError or TypeError naming the argument, before anything is written. A slot past the end is the caller's
    error: on a CPU an IndexError before anything is written, elsewhere it is not looked for.
    """
    named = {"key": key}
    latent = isinstance(kv_cache, Tensor) and kv_cache.dim() == 3
    if not latent:
        if value is None:
            raise ValueError("value: None found; only a latent cache has its values among the keys")
        named["value"] = value
    check_tensors(*named.values(), slot_mapping, names=(*named, "slot_mapping"), why_not=not_strided)
    caches = _written_caches(kv_cache, None if latent else value, layout)
    check_slots(slot_mapping)
    check_devices(*named.values(), *caches, slot_mapping, names=(*named, *["kv_cache"] * len(caches), "slot_mapping"))
    tokens = {name: new.shape[0] if new.dim() else 0 for name, new in named.items()}
    if any(count != len(slot_mapping) for count in tokens.values()):
        found = " and ".join(counted(count, name) for name, count in tokens.items())
        raise ValueError(f"slot_mapping: shape {tuple(slot_mapping.shape)} found for {found}; give one slot a token")
    for (name, new), cache in zip(named.items(), caches, strict=True):
        if new.shape[1:] != cache.shape[2:]:
            raise ValueError(
                f"{name}: heads and head size {tuple(new.shape[1:])} found; the cache holds {tuple(cache.shape[2:])}"
            )
    if not len(slot_mapping):
        return
    put = _put if slot_mapping.device.type == "cpu" else put_unasked
    with torch.no_grad():  # a cache has no gradient
        for cache in caches:
            check_written("kv_cache", cache)
        one_scale = are_one(k_scale, v_scale, LARGEST.get(caches[0].dtype, 0.0))
        if value is not None and len(caches) == 2 and overwrites(key, value, *caches, one_scale=one_scale):
            raise ValueError("kv_cache: keys and values share memory, and values would overwrite keys; give two caches")
        if slot_mapping.device.type == "cpu":
            check_last_slot(slot_mapping, caches[0])
        for new, cache, scale in zip(named.values(), caches, (k_scale, v_scale), strict=False):
            put(as_indexed(held(new, cache.dtype, scale)), as_indexed(cache), slot_mapping)


def _written_caches(kv_cache: Caches, value: Tensor | None, layout: str) -> tuple[Tensor, ...]:
    """The caches that ``write`` writes to: of keys and of values, or of latent rows, where ``value`` is None."""
    if isinstance(kv_cache, Tensor):
        check_strided("kv_cache", kv_cache)
        if value is None:
            return key_value(kv_cache)[:1]
        joined = kv_cache.dim() == 4 and value.dim()
        return key_value(kv_cache, value.shape[-1] if joined else None, layout)
    _check_tensors("kv_cache", kv_cache)
    for cache in kv_cache:
        check_strided("kv_cache", cache)
    keys, values = key_value(kv_cache)
    check_pair("kv_cache", keys, values)
    return keys, values


def _put(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store each token whose slot is not below 0."""
    written = slots >= 0
    if not bool(written.all()):
        new, slots = new[written], slots[written]
    if cache.is_contiguous():
        cache.flatten(0, 1)[slots] = new
    else:
        cache[_places(slots, cache.shape[1])] = new


def put_unasked(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """The same on a device that is not asked how many tokens those are: the others repeat what the first of them
    writes; where there is none, all write to slot 0 what it holds. There is one token at least.
    """
    written = slots >= 0
    tokens = torch.arange(len(slots), dtype=torch.int64, device=slots.device)
    tokens = torch.where(written, tokens, written.to(torch.int8).argmax())
    places = _places(slots[tokens].clamp(min=0), cache.shape[1])
    cache[places] = torch.where(written.any(), new[tokens], cache[places])


def _places(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Block and offset of each slot."""
    return torch.div(slots, block_size, rounding_mode="floor"), torch.remainder(slots, block_size)


def read(cache: Tensor, slots: Tensor) -> Tensor:
    """The tokens that ``slots`` name in a cache of keys or of values ``[blocks, block_size, num_kv_heads, head_size]``.

    ``slots`` is int64 of any shape. Returns ``(*slots.shape, num_kv_heads, head_size)`` in the cache's dtype, without
    its scale. Slots have to be in range: nothing is clamped.
    """
    block_size, num_kv_heads, head_size = cache.shape[1:]
    indexed = as_indexed(cache)
    if cache.is_contiguous():
        rows = indexed.view(-1, num_kv_heads * head_size).index_select(0, slots.reshape(-1))
        return rows.view(cache.dtype).view(*slots.shape, num_kv_heads, head_size)
    return indexed[_places(slots, block_size)].view(cache.dtype)


def copy_blocks(
    kv_caches: Tensor | Iterable[Caches], block_pairs: Any, *, block_dim: int = 1,
    views: Callable[[Any], Iterable[Tensor]] | None = None,
) -> None:  # fmt: skip
    """Copy whole blocks inside each cache: ``block_pairs`` is ``(n, 2)``, source and destination (for copy-on-write).

    One cache or one for each layer, in place. All sources are read before anything is written, so a chain such as
    ``[(1, 2), (2, 3)]`` moves the old content of both; in a cache that several layers have, once. ``block_dim`` says
    which dimension counts blocks where keys and values are stacked in one tensor; in other caches it is the first. A
    block id outside the cache, a destination named twice, or two caches that share a part of their memory is a
    ValueError. Pairs on a GPU are brought back to be checked. ``views``, such as a backend's ``kv_cache_views``, show
    which caches are the same, where layers have one in several forms.
    """
    block_dim = integer("block_dim", block_dim, 0)
    if not isinstance(kv_caches, Iterable):
        raise ValueError(f"kv_caches: {type(kv_caches).__name__} found; give the cache of each layer")
    views = views or partial(_keys_and_values, block_dim=block_dim)
    caches = [kv_caches] if isinstance(kv_caches, Tensor) else distinct_caches(kv_caches, views)
    layers = [_parts("kv_caches", cache, block_dim) for cache in caches]
    parts = [part for layer in layers for part in layer]
    if not parts:
        return
    for part in parts:
        check_written("kv_caches", part)
    pairs = _checked_pairs(block_pairs, *(min(part.shape[0] for part in parts),) * 2)
    for layer in layers:
        _copy(layer, layer, pairs)


def swap_blocks(source: Caches, target: Caches, block_pairs: Any, *, block_dim: int = 1) -> None:
    """Copy whole blocks from one cache to another, say GPU to CPU: ``block_pairs`` is ``(n, 2)``, source and target.

    The caches may differ in device and in number of blocks; the shape of a block and the dtype have to agree. On
    return the data has left ``source`` in stream order: when ``target`` is on the CPU it is there.
    """
    block_dim = integer("block_dim", block_dim, 0)
    sources, targets = _parts("source", source, block_dim), _parts("target", target, block_dim)
    if len(sources) != len(targets):
        raise ValueError(f"target: {counted(len(targets), 'tensor')} found; the source has {len(sources)}")
    for a, b in zip(sources, targets, strict=True):
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise ValueError(
                f"target: blocks of {tuple(b.shape[1:])} {b.dtype} found; the source has {tuple(a.shape[1:])} {a.dtype}"
            )
        check_strided("source", a)
        check_written("target", b)
    counts = (min(part.shape[0] for part in parts) for parts in (sources, targets))
    _copy(sources, targets, _checked_pairs(block_pairs, *counts))


def _copy(sources: list[Tensor], targets: list[Tensor], pairs: NDArray[np.int64]) -> None:
    """Copies blocks of each part. Values may be a part of the keys: all are read before any is written."""
    ids = [_indices(pairs, source, target) for source, target in zip(sources, targets, strict=True)]
    blocks = [as_indexed(source)[from_ids] for source, (from_ids, _) in zip(sources, ids, strict=True)]
    for target, (_, to_ids), chosen in zip(targets, ids, blocks, strict=True):
        as_indexed(target)[to_ids] = chosen.to(target.device)


def _parts(name: str, cache: Caches, block_dim: int) -> list[Tensor]:
    """Views of a cache whose first dimension counts blocks, as it does unless keys and values are stacked."""
    if isinstance(cache, Tensor):
        if block_dim >= cache.dim():
            raise ValueError(f"block_dim: {block_dim} found for a cache of {counted(cache.dim(), 'dimension')}")
        return [cache if cache.dim() < 5 else cache.movedim(block_dim, 0)]
    _check_tensors(name, cache)
    return list(cache)


def _keys_and_values(cache: Caches, *, block_dim: int) -> list[Tensor]:
    """Keys and values that are stacked in one tensor, as the pair of them; else ``_parts``."""
    parts = _parts("kv_caches", cache, block_dim)
    return list(parts[0].unbind(1)) if len(parts) == 1 and parts[0].dim() == 5 else parts


def _checked_pairs(block_pairs: Any, num_source: int, num_target: int) -> NDArray[np.int64]:
    host = block_pairs.cpu() if isinstance(block_pairs, Tensor) else block_pairs
    return block_pairs_of("block_pairs", host, num_source, num_target)


def _indices(pairs: NDArray[np.int64], source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    columns = [torch.from_numpy(np.ascontiguousarray(pairs[:, i])) for i in range(2)]
    return (
        columns[0].to(source.device, non_blocking=True),
        columns[1].to(target.device, non_blocking=True),
    )
