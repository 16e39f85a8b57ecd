"""One layer over a latent cache: the same as any other, but that the values are a part of what is written as keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_flashinfer.impl import FlashInferImpl
from attn_flashinfer.latent_run import latent_cache
from attncore import CacheWriter


class LatentImpl(FlashInferImpl):
    """One layer of latent attention.

    ``forward`` takes the queries (T, num_heads, head_size) and the latent rows (T, 1, head_size) as ``key``, reads no
    ``value``, and gives (T, num_heads, head_size_v). ``kv_cache`` is (blocks, block_size, head_size), or None in a
    profiling run. See the base class for the rest.
    """

    not_taken = ("alibi_slopes", "sinks")
    values_in_keys = True

    def scales_changed(self) -> None:
        """See the base class: k_scale is the scale of the values, too."""
        self._new_writer(CacheWriter(self.k_scale, self.k_scale))
        self._scales, self._of_query, self._of_output = {}, None, None
        if not isinstance(self.k_scale, float):
            self._of_query = self._of_output = self.k_scale.view(-1, 1, 1)
        elif self.k_scale != 1.0:
            self._scales = {"k_scale": self.k_scale}

    @property
    def _size_v(self) -> int:
        return self.backend.config.head_size_v or self.backend.config.head_size

    def _empty(self, query: Tensor) -> Tensor:
        return query.new_empty((query.shape[0], query.shape[1], self._size_v))

    def _for_kernels(self, keys: Tensor, values: Tensor) -> Any:
        return latent_cache(keys.squeeze(2), self.backend.shape, self._size_v)
