"""A builder with captured sizes, and a backend that states how it may be captured, for the tests of capture."""

import numpy as np

from attncore import AttentionBackend, AttentionImpl, BackendConfig, BackendSpec, MultipleOf
from attncore.builder import InputBatch, MetadataBuilder

BLOCK, MAX_REQS, MAX_LEN = 4, 8, 40


def new_builder(kernels, *, backend=None, threshold=3, groups=None, max_encoder_len=None, depth=2, max_tokens=24):
    own = {"block_size": BLOCK} if groups is None else {"groups": groups, "max_encoder_len": max_encoder_len}
    batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, kernels=kernels, **own)
    return batch, MetadataBuilder(
        batch, backend, max_num_batched_tokens=max_tokens, decode_threshold=threshold, depth=depth
    )


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


def spec(level, **facts):
    return BackendSpec(
        name="plain", api=1, factory="tests:Plain", devices={"any": 0}, dtypes={"float32"}, cuda_graph=level,
        head_sizes=MultipleOf(1), block_sizes=MultipleOf(1), features={"multi_token_decode"}, **facts,
    )  # fmt: skip


def config(spec=None):
    return BackendConfig(num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=BLOCK, spec=spec)
