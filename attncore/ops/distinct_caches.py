"""Caches that several layers have together: what moves in one must not move twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def distinct_caches(kv_caches: Iterable[Any]) -> list[Any]:
    """Each cache once, by its memory: two tensors may show the same. Objects that are no tensors count by identity."""
    found: dict[Any, Any] = {}
    for kv_cache in kv_caches:
        parts = kv_cache if isinstance(kv_cache, (tuple, list)) else (kv_cache,)
        try:
            key: Any = tuple((part.device, part.data_ptr(), part.dtype, part.shape, part.stride()) for part in parts)
        except (AttributeError, RuntimeError, TypeError):  # a vendor's own object, or a tensor without an address
            key = id(kv_cache)
        found.setdefault(key, kv_cache)
    return list(found.values())
