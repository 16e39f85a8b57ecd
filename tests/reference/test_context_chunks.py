"""Prefills over a latent cache, their contexts in chunks: the same as attention to all of it at once."""

import pytest
import torch

from attncore import BackendConfig, InputBatch, MetadataBuilder
from attncore.builder import context_chunk_metadata, context_chunks, new_tokens_metadata
from attncore.dense import dense_attention
from attncore.merge import merge_attention
from attncore.reference import ReferenceBackend
from attncore.reference import cache as kv_cache

BLOCK, HEADS, LATENT, ROPE, NOPE, VALUE = 4, 4, 8, 3, 6, 5
SCALE = 0.3
CONTEXTS = {"a": 21, "b": 0, "c": 40, "d": 7, "e": 8}
STEP = {"a": 7, "b": 5, "c": 3, "d": 1, "e": 2}  # d decodes


class Model:
    """Queries of NOPE + ROPE; latent rows of LATENT + ROPE, which project up to keys of NOPE + ROPE and to values."""

    def __init__(self):
        config = {"num_heads": HEADS, "dtype": "float32", "block_size": BLOCK}
        latent = BackendConfig(num_kv_heads=1, head_size=LATENT + ROPE, head_size_v=LATENT, use_mla=True, **config)
        plain = BackendConfig(num_kv_heads=HEADS, head_size=NOPE + ROPE, head_size_v=VALUE, **config)
        self.latent, self.plain = ReferenceBackend(latent), ReferenceBackend(plain)
        self.to_key, self.to_value = torch.randn(HEADS, NOPE, LATENT) / 3, torch.randn(HEADS, VALUE, LATENT) / 3

    def up(self, rows):
        content, rope = rows[:, 0, :LATENT], rows[:, 0, LATENT:]
        key = torch.einsum("hnl,tl->thn", self.to_key, content)
        key = torch.cat((key, rope.unsqueeze(1).expand(-1, HEADS, -1)), dim=2)
        return key, torch.einsum("hvl,tl->thv", self.to_value, content)

    def absorbed(self, query):
        content = torch.einsum("hnl,thn->thl", self.to_key, query[..., :NOPE])
        return torch.cat((content, query[..., NOPE:]), dim=2)


@pytest.mark.parametrize(("workspace", "num_chunks"), [(16, 5), (17, 5), (30, 3), (1000, 1)])
def test_chunks_and_the_new_tokens_merge_to_the_whole(workspace, num_chunks):
    torch.manual_seed(0)
    model = Model()
    batch = InputBatch(max_num_reqs=8, max_model_len=64, block_size=BLOCK)
    builder = MetadataBuilder(batch, model.latent, max_num_batched_tokens=128)
    free = iter(torch.randperm(39).add(1).tolist())
    cache = model.latent.allocate_kv_cache(40).fill_(torch.nan)
    mla = model.latent.impl("layer", scale=SCALE)
    said = {}

    def run(scheduled):
        metadata = builder.build(scheduled)
        new = torch.randn(metadata.num_tokens, 1, LATENT + ROPE)
        query = torch.randn(metadata.num_tokens, HEADS, NOPE + ROPE)
        for row, name in enumerate(metadata.req_ids):
            tokens = slice(*metadata.host.query_start_loc[row : row + 2])
            said[name] = torch.cat((said.get(name, new[:0]), new[tokens]))
        output = mla.forward(model.absorbed(query), new, None, cache, metadata)
        return metadata, query, new, torch.einsum("hvl,thl->thv", model.to_value, output)

    for name, context in CONTEXTS.items():
        batch.add_request(name, [next(free) for _ in range(-(-(context + STEP[name]) // BLOCK))])
    run(CONTEXTS)
    metadata, query, new, absorbed = run(STEP)
    for row, name in enumerate(metadata.req_ids):
        tokens = slice(*metadata.host.query_start_loc[row : row + 2])
        whole = dense_attention(query[tokens], *model.up(said[name]), scale=SCALE)
        torch.testing.assert_close(absorbed[tokens], whole, atol=1e-4, rtol=1e-4)

    assert metadata.num_decodes == 1
    query, new, expected = query[1:], new[1:], absorbed[1:]
    prefills = metadata.prefill_metadata
    chunks = context_chunks(prefills.host.block_table, prefills.host.context_lens, BLOCK, workspace)
    assert chunks.num_chunks == num_chunks
    own = model.plain.impl("own", scale=SCALE)
    chunk = model.plain.impl("context", scale=SCALE, attn_type="encoder_decoder")
    parts = [own.forward_with_lse(query, *model.up(new), None, new_tokens_metadata(prefills))]
    for index, slots in enumerate(chunks.chunk_slots):
        rows = kv_cache.read(kv_cache.key_value(cache)[0], torch.from_numpy(slots))
        assert len(rows) <= workspace
        step = context_chunk_metadata(prefills, chunks, index)
        parts.append(chunk.forward_with_lse(query, *model.up(rows), None, step))
    output, _ = merge_attention(*zip(*parts, strict=True))
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
