"""A batch of two requests, and a backend that does nothing, for the tests of arenas."""

from attncore import AttentionBackend, AttentionImpl, BackendConfig
from attncore.builder import InputBatch

CONFIG = BackendConfig(num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=4)


class Impl(AttentionImpl):
    def forward(self, query, key, value, kv_cache, metadata, output=None):
        return query


class Backend(AttentionBackend):
    name = "late"
    impl_class = Impl

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def two_requests(kernels):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
    batch.add_request("a", range(1, 9), 3)
    batch.add_request("b", range(9, 17), 6)
    return batch
