"""A builder with captured sizes, and a backend that states how it may be captured, for the tests of capture."""

from builder.plain_backend import BLOCK

from attncore import BackendSpec, MultipleOf
from attncore.builder import InputBatch, MetadataBuilder

MAX_REQS, MAX_LEN = 8, 40


def new_builder(kernels, *, backend=None, threshold=3, groups=None, max_encoder_len=None, depth=2, max_tokens=24):
    own = {"block_size": BLOCK} if groups is None else {"groups": groups, "max_encoder_len": max_encoder_len}
    batch = InputBatch(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, kernels=kernels, **own)
    return batch, MetadataBuilder(
        batch, backend, max_num_batched_tokens=max_tokens, decode_threshold=threshold, depth=depth
    )


def spec(level, **facts):
    return BackendSpec(
        name="plain", api=1, factory="tests:Plain", devices={"any": 0}, dtypes={"float32"}, cuda_graph=level,
        head_sizes=MultipleOf(1), block_sizes=MultipleOf(1), features={"multi_token_decode"}, **facts,
    )  # fmt: skip
