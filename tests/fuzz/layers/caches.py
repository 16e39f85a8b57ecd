"""Caches of layers in every form that the contract allows, and numbers that they hold exactly."""

from __future__ import annotations

import random
from typing import Any

import torch
from fuzz.layers.settings import Settings, Tested
from torch import Tensor


def new_cache(draw: random.Random, backend: Any, num_blocks: int, tested: Tested) -> Any:
    """A whole cache, a pair of views, or bytes; nobody's slots hold what the backend may meet there."""
    cache = backend.allocate_kv_cache(num_blocks)
    views = backend.kv_cache_views(cache)
    features = tested.features if backend.spec is None else backend.spec.features
    if "strided_kv_cache" in features and not backend.config.use_mla and draw.random() < 0.4:
        wide = [_multiple_of_16_bytes(view) for view in views]
        if wide[0] == wide[1]:
            cache = _pool(views) if draw.random() < 0.5 else _heads_first(views)
        else:
            cache = views[0].clone(), views[1].clone()
        if not all(wide):
            cache = views[0].clone(), views[1].clone()
    for view in backend.kv_cache_views(cache):
        nobodys(view, finite=tested.finite)
    if "fp8" in str(backend.config.kv_cache_dtype) and isinstance(cache, Tensor) and draw.random() < 0.3:
        return cache.view(torch.uint8)
    return cache


def _multiple_of_16_bytes(view: Tensor) -> int:
    """The bytes of a row, where a pair of views may have it as a stride; else 0."""
    row = view.shape[3] * view.element_size()
    return row if row % 16 == 0 else 0


def _pool(views: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A layer of three in a pool of blocks."""
    blocks, *rest = views[0].shape
    pool = views[0].new_zeros(blocks, 3, 2, *rest)
    return pool[:, 1, 0], pool[:, 1, 1]


def _heads_first(views: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of a key and a value, by heads."""
    blocks, tokens, heads, size = views[0].shape
    rows = views[0].new_zeros(blocks, heads, tokens, 2 * size).transpose(1, 2)
    return rows[..., :size], rows[..., size:]


def nobodys(part: Tensor, *, finite: bool) -> None:
    """Fills a part of a cache's view that belongs to no request: with NaN, unless numbers there must be ``finite``."""
    part.copy_(torch.full(part.shape, 2.0 if finite else float("nan")).to(part.dtype))


class Numbers:
    """Random queries, keys and values: drawn on the host, where they are compared, and handed to layers on a device."""

    def __init__(self, draw: random.Random, config: Any) -> None:
        self.draw, self.device = draw, config.device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.generator = torch.Generator().manual_seed(draw.randrange(2**32))

    def rows(self, count: int, heads: int, size: int, settings: Settings) -> Tensor:
        """(count, heads, size): numbers that a cache of these settings holds exactly, with a scale of 2**n."""
        found = torch.randn(count, heads, size, generator=self.generator, dtype=torch.float32)
        if settings.cache_dtype != "auto":
            found = (found * 2).round().clamp(-4, 4) / 2
        return found.to(self.dtype)

    def given(self, rows: Tensor, count: int = 0) -> Tensor:
        """The numbers on the device, with rows of NaN behind, ``count`` in all; sometimes a part of a wider tensor."""
        wide = self.room(max(len(rows), count), *rows.shape[1:], fill=float("nan"))
        wide[: len(rows)] = self.sent(rows)
        return wide

    def room(self, tokens: int, heads: int, size: int, *, fill: float) -> Tensor:
        """(tokens, heads, size) in one of the forms that a layer takes: contiguous, a part of a wider tensor, heads
        before tokens, or tokens in the opposite order of a wider tensor's.
        """
        form = self.draw.choice(["plain"] * 4 + ["part", "part", "heads first", "apart"])
        if form == "plain":
            return self._filled((tokens, heads, size), fill)
        if form == "part":
            return self._filled((tokens, heads + 2, size + 16), fill)[:, 1 : 1 + heads, 8 : 8 + size]
        if form == "heads first":
            return self._filled((heads + 1, tokens + 3, size), fill)[:heads, 2 : 2 + tokens].transpose(0, 1)
        return self._filled((tokens, 3, 2 * heads, size), fill)[:, 1, ::2]

    def _filled(self, shape: tuple[int, ...], fill: float) -> Tensor:
        return torch.full(shape, fill, dtype=self.dtype, device=self.device)

    def sent(self, rows: Tensor) -> Tensor:
        """``rows`` on the device, which the host does not wait for."""
        return rows.pin_memory().to(self.device, non_blocking=True) if "cuda" in str(self.device) else rows
