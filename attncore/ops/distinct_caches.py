"""Caches that several layers have together: what moves in one must not move twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import Tensor

from attncore.ops.written_tensor import check_own_elements, share_memory

_NO_VIEWS = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)
"""What the views of a cache that has none raise, or a tensor without an address; the caller says so where it needs
them."""
_KNOWN = 16
_apart: set[Hashable] = set()
"""Caches, by where they lie, that were found to share nothing: an engine gives the same ones in each call."""


def distinct_caches(kv_caches: Iterable[Any], views: Callable[[Any], Iterable[Tensor]]) -> list[Any]:
    """Each cache once, by its memory: two objects may show the same, of one form or of several (whole, a pair, bytes).

    Caches of several forms are compared by their ``views``, such as ``kv_cache_views`` of a backend gives; where there
    are none, by their own tensors. What is no tensor counts by identity. ValueError naming ``kv_caches`` where two
    share memory and are not the same: a part of them would move twice.
    """
    if isinstance(kv_caches, Tensor):
        raise ValueError("kv_caches: a tensor found; give a list of one cache for each layer")
    caches = list({id(kv_cache): kv_cache for kv_cache in kv_caches}.values())
    if len(caches) < 2:
        return caches
    shown = [_parts(kv_cache) for kv_cache in caches]
    if len({_form(parts) for parts in shown}) > 1:
        shown = [_viewed(kv_cache, views, parts) for kv_cache, parts in zip(caches, shown, strict=True)]
    found: dict[Hashable, tuple[Any, tuple[Tensor, ...]]] = {}
    for kv_cache, parts in zip(caches, shown, strict=True):
        place = _place(parts)
        found.setdefault(id(kv_cache) if place is None else place, (kv_cache, () if place is None else parts))
    key = tuple(found)
    if key not in _apart:
        _check_apart([parts for _, parts in found.values()])
        if len(_apart) >= _KNOWN:
            _apart.clear()
        _apart.add(key)
    return [kv_cache for kv_cache, _ in found.values()]


def _parts(kv_cache: Any) -> tuple[Any, ...]:
    return tuple(kv_cache) if isinstance(kv_cache, (tuple, list)) else (kv_cache,)


def _form(parts: tuple[Any, ...]) -> Hashable:
    try:
        return tuple((part.dtype, part.shape, part.stride()) for part in parts)
    except _NO_VIEWS:
        return None


def _viewed(kv_cache: Any, views: Callable[[Any], Iterable[Tensor]], otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return tuple(views(kv_cache))
    except _NO_VIEWS:
        return otherwise


def _place(parts: tuple[Any, ...]) -> Hashable:
    """Where the elements of tensors lie; None where one says nothing of that. Of an axis with one element the stride
    says nothing."""
    try:
        if any(part.is_meta for part in parts):
            return None
        return tuple(
            (
                part.device,
                part.data_ptr(),
                part.itemsize,
                tuple(
                    (size, stride if size > 1 else 0) for size, stride in zip(part.shape, part.stride(), strict=True)
                ),
            )
            for part in parts
        )
    except _NO_VIEWS:
        return None


def _check_apart(caches: list[tuple[Tensor, ...]]) -> None:
    """ValueError where a tensor of one cache shares memory with one of another. Those alone are compared whose ends
    leave room for it."""
    spans = []
    for index, parts in enumerate(caches):
        for part in parts:
            if part.numel():
                last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
                start = part.data_ptr()
                spans.append((str(part.device), start, start + (last + 1) * part.itemsize, index, part))
    spans.sort(key=lambda span: span[:2])
    open_spans: list[Any] = []
    for span in spans:
        device, start, _, index, part = span
        open_spans = [other for other in open_spans if other[0] == device and other[2] > start]
        for _, _, _, other_index, other in open_spans:
            if index != other_index and _share(other, part):
                raise ValueError(
                    "kv_caches: two of them share a part of their memory, which would move twice; give layers the same "
                    "cache, or caches of their own"
                )
        open_spans.append(span)


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, whose ends leave room for it, have an element in common, as far as their axes tell."""
    for part in (one, other):
        check_own_elements("kv_caches", part)
    if (one.dim(), one.itemsize) != (other.dim(), other.itemsize):
        return True
    return share_memory(one, other)
