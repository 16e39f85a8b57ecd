"""The backend ``flash`` over latent caches (MLA): FlashAttention 3, and a cache of one row a token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_flash.backend import FlashBackend
from attn_flash.impl import FlashImpl, check_tokens
from attn_flash.latent_layer import LatentLayer
from attn_flash.probe_results import LATENT
from attncore import BackendConfig


class LatentImpl(FlashImpl):
    """One layer of latent attention in its absorbed form.

    Every method takes the queries (T, num_heads, head_size) and the latent rows (T, 1, head_size) as ``key``, reads no
    ``value``, and gives (T, num_heads, head_size_v). ``kv_cache`` is (blocks, block_size, head_size), or None in a
    profiling run. All are of the model's dtype and on the device.
    """

    values_in_keys = True

    def _views_of(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        # Rows are written whole, by the writer's own rule for values that are all columns of the keys.
        rows = super()._views_of(kv_cache)[0]
        return rows, rows

    def _check_new(self, num_tokens: int, key: Tensor | None, value: Tensor | None) -> None:
        check_tokens(num_tokens, key=key)


class LatentBackend(FlashBackend):
    """FlashAttention 3 over latent caches: one tensor ``[blocks, block_size, head_size]``, whose first ``head_size_v``
    columns are the values too. See the base class for what it raises.
    """

    impl_class = LatentImpl

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._refuse_left_out("use_mla", LATENT, "the kernel of latent rows")
        self._layer_class = partial(LatentLayer, num_heads=config.num_heads, cores=_cores(config.device))

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """A row a token, without heads."""
        return (num_blocks, block_size, head_size)


def _cores(device: str) -> int:
    """The multiprocessors of a CUDA device; elsewhere an H100's."""
    if torch.device(device).type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
