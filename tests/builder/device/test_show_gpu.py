"""What steps on a CUDA device print costs no synchronisation."""

import pytest
import torch

from attncore import AttentionRequest, InputBatch, MetadataBuilder, select

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_printing_a_step_synchronises_nothing():
    request = AttentionRequest(num_heads=2, num_kv_heads=1, head_size=64, dtype=torch.float32, block_size=4)
    backend = select(request, backend="reference").create(device="cuda")
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, backend, max_num_batched_tokens=64)
    batch.add_request("a", [1, 2], 3)
    batch.add_request("b", [3, 4])
    metadata = builder.build({"b": 5})
    views = metadata.decode_metadata, metadata.prefill_metadata
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in (batch, builder, metadata, metadata.host, *views, backend):
            assert "not shown" not in repr(one) + str(one)
            assert dir(one)
        assert "tensors on cuda" in repr(metadata)
        assert "column 0: block 1" in metadata._repr_html_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
