"""Random queries, keys and values whose numbers are exact in the backend's dtype and, where needed, in its cache's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from attncore.abstract import BackendConfig

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
GRID = (-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0)  # exact in every dtype of a cache, times a scale that is 2**n
Part = Literal["query", "key", "value"]


def scale_of(features: Mapping[str, Any], name: str) -> Tensor:
    """A layer's ``k_scale`` or ``v_scale``, a number or a tensor: float32 (1, 1) or (num_kv_heads, 1) on the host."""
    return torch.as_tensor(features.get(name, 1.0), dtype=torch.float32).cpu().reshape(-1, 1)


class RandomTensors:
    """Draws float32 tensors on the host for a backend's configuration, from ``seed``.

    Queries are normal with a standard deviation of 1.5, keys and values of 1; with ``on_grid`` keys and values are
    numbers of GRID times the layer's ``k_scale`` or ``v_scale``, which the cache holds exactly: it makes no difference
    then whether a kernel reads fresh keys or cached ones. Nor does it beside an fp8 cache whether a kernel rounds
    queries to fp8: they are numbers of it. With ``every_key`` queries are 1 and keys this number.
    """

    every_key: float | None = None

    def __init__(
        self,
        config: BackendConfig,
        features: Mapping[str, Any],
        random: np.random.Generator,
        seed: int,
        *,
        on_grid: bool,
    ) -> None:
        self.config, self.features, self.random, self.on_grid = config, features, random, on_grid
        self._torch_random = torch.Generator().manual_seed(seed)

    def draw(self, count: int, part: Part) -> Tensor:
        """(count, heads, size) of one part."""
        config = self.config
        size = (config.head_size_v or config.head_size) if part == "value" else config.head_size
        shape = (count, config.num_heads if part == "query" else config.num_kv_heads, size)
        if part != "value" and self.every_key is not None:
            return torch.full(shape, 1.0 if part == "query" else self.every_key)
        if part != "query" and self.on_grid:
            drawn = torch.from_numpy(self.random.choice(np.array(GRID, dtype=np.float32), shape))
            return drawn * scale_of(self.features, "v_scale" if part == "value" else "k_scale")
        drawn = torch.randn(shape, generator=self._torch_random) * (1.5 if part == "query" else 1.0)
        if self.on_grid and config.kv_cache_dtype in FP8:
            drawn = drawn.to(FP8[config.kv_cache_dtype]).float()
        return drawn.to(getattr(torch, config.dtype)).float()

    def query_key_value(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of ``count`` tokens; the values of a latent cache are the keys' first columns."""
        query, key = self.draw(count, "query"), self.draw(count, "key")
        if self.config.use_mla:
            return query, key, key[..., : self.config.head_size_v].clone()
        return query, key, self.draw(count, "value")
