"""Contexts in chunks: a chunk's keys and the step's own, which no cache holds, merged; beside the reference backend."""

import pytest
import torch

import attncore
from attncore.builder import (
    InputBatch,
    MetadataBuilder,
    context_chunk_metadata,
    context_chunks,
    new_tokens_metadata,
)
from attncore.merge import merge_attention

REQUESTS = {"a": (6, 14, [(8, 11), (11, 15)]), "b": (0, 7, [(2, 6)]), "c": (21, 5, [])}
"""Of each request: its context, its tokens in the step, and its spans."""
BLOCK = 16


def backend(name, device=None):
    request = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "block_size": BLOCK}
    features = {"bidirectional_spans", "lse", "encoder_decoder"}
    return attncore.select(**request, features=features, backend=name).create(device)


def prefills(backend, spans):
    """The metadata of a step of REQUESTS, each in blocks of its own."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK, spans=True)
    for index, (name, (context, _, of_request)) in enumerate(REQUESTS.items()):
        batch.add_request(name, [2 * index + 1, 2 * index + 2], context)
        batch.set_spans(name, of_request if spans else [])
    scheduled = {name: tokens for name, (_, tokens, _) in REQUESTS.items()}
    return MetadataBuilder(batch, backend, max_num_batched_tokens=64).build(scheduled).prefill_metadata


@pytest.mark.parametrize("spans", [False, True])
def test_the_parts_are_the_step(spans):
    """A token in a span sees those behind it there, with a context and without a cache as elsewhere."""
    torch.manual_seed(0)
    rocm, reference = backend("rocm"), backend("reference", "cpu")
    context = torch.randn(2, 8 * BLOCK, 2, 16)
    query, key, value = (torch.randn(26, heads, 16) for heads in (4, 2, 2))

    whole = prefills(reference, spans)
    cached = tuple(part.view(8, BLOCK, 2, 16).clone() for part in context)
    expected = reference.impl("0", scale=0.25).forward(query, key, value, cached, whole)

    step, device = prefills(rocm, spans), rocm.config.device
    query, key, value, context = (tensor.to(device) for tensor in (query, key, value, context))
    own = rocm.impl("0", scale=0.25)
    across = rocm.impl("0", scale=0.25, attn_type="encoder_decoder")
    parts = [own.forward_with_lse(query, key, value, None, new_tokens_metadata(step))]
    chunks = context_chunks(step.host.block_table, step.host.context_lens, BLOCK, 2 * BLOCK)
    for index, slots in enumerate(chunks.chunk_slots):
        keys, values = context[:, torch.from_numpy(slots).to(device)]
        parts.append(across.forward_with_lse(query, keys, values, None, context_chunk_metadata(step, chunks, index)))
    output, _ = merge_attention(*zip(*parts, strict=True))
    torch.testing.assert_close(output.cpu(), expected, atol=2e-3, rtol=2e-3)
