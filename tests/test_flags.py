"""Arguments that are true or false: a bool, NumPy's too, and nothing that Python merely takes as true."""

import numpy as np
import pytest
import torch
from builder.device.arena_batches import two_requests

from attncore import BackendConfig
from attncore.builder import (
    CommonMetadataBuilder,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    split_decodes_and_prefills,
)
from attncore.dense import dense_attention


def add(value):
    groups = [KVCacheGroup("a", 4), KVCacheGroup("x", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=groups, max_encoder_len=12)
    batch.add_request("r", {"a": [1], "x": [2]}, encoder_seq_len=3, encoder_computed=value)


def dense(**flags):
    ones = torch.ones(1, 1, 8)
    dense_attention(ones, ones, ones, scale=1.0, **flags)


FLAGS = {
    "overlapped": lambda value: MetadataBuilder(two_requests("cython"), max_num_batched_tokens=8).build(
        overlapped=value
    ),
    "ticket": lambda value: MetadataBuilder(two_requests("cython"), max_num_batched_tokens=8, ticket=value),
    "encoder_computed": add,
    "groups[0].cross": lambda value: InputBatch(
        max_num_reqs=4, max_model_len=64, groups=[KVCacheGroup("a", 4, cross=value)]
    ),
    "encoder_decoder": lambda value: CommonMetadataBuilder(4, encoder_decoder=value),
    "chunked_prefill": lambda value: CommonMetadataBuilder(4, chunked_prefill=value),
    "require_uniform": lambda value: split_decodes_and_prefills([1, 2], 2, require_uniform=value),
    "causal": lambda value: dense(causal=value),
    "return_lse": lambda value: dense(return_lse=value),
    "use_mla": lambda value: BackendConfig(1, 1, 8, "float32", 4, use_mla=value),
}


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_no_bool_is_refused(name):
    for value in (False, np.False_):
        FLAGS[name](value)
    for value in ("no", 1, 0, None, 1.0, torch.tensor(True), np.array([True])):
        with pytest.raises(TypeError) as caught:
            FLAGS[name](value)
        assert str(caught.value).startswith(f"{name}: ")
        assert str(caught.value).endswith(" is not True or False")
