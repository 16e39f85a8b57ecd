"""The least backends that a builder takes: their attention gives the queries back."""

import numpy as np

from attncore import AttentionBackend, AttentionImpl, BackendConfig

BLOCK = 4


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class Least(AttentionBackend):
    name = "least"
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class Plain(Least):
    """Its steps have NumPy arrays."""

    name = "plain"

    def from_host(self, array):
        return np.asarray(array)


def config(spec=None, block_size=BLOCK):
    return BackendConfig(num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=block_size, spec=spec)
