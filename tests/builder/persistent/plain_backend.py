"""The least backend that a builder takes: its attention gives the queries back."""

import numpy as np

from attncore import AttentionBackend, AttentionImpl, BackendConfig

BLOCK = 4


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class Plain(AttentionBackend):
    name = "plain"
    impl_class = Impl

    def from_host(self, array):
        return np.asarray(array)

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def config(spec=None, block_size=BLOCK):
    return BackendConfig(num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=block_size, spec=spec)
