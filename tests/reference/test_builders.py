"""Steps of both builders, on a cache whose unowned slots hold NaN, against dense attention over all that was said."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore import BackendConfig, CommonMetadataBuilder, InputBatch, MetadataBuilder, Sequence, SequenceGroup
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend

BLOCK, NUM_BLOCKS = 4, 64


class Engine:
    """Requests with all their keys and values, a pool of blocks, and a cache of one layer."""

    def __init__(self, window):
        config = BackendConfig(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=BLOCK)
        self.backend = ReferenceBackend(config)
        self.features = {"scale": 0.3, "sliding_window": window}
        self.impl = self.backend.impl("layer", **self.features)
        self.cache = self.backend.allocate_kv_cache(NUM_BLOCKS).fill_(torch.nan)
        self.free = torch.randperm(NUM_BLOCKS - 1).add(1).tolist()
        self.said = {}

    def blocks(self, num_tokens, held=0):
        return [self.free.pop() for _ in range(-(-num_tokens // BLOCK) - held)]

    def take_back(self, blocks):
        self.cache[:, blocks] = torch.nan
        self.free += blocks

    def say(self, req_id, num_tokens):
        new = torch.randn(2, num_tokens, 2, 8)
        self.said[req_id] = torch.cat((self.said.get(req_id, new[:, :0]), new), dim=1)
        return new

    def check(self, metadata, step):
        """``step``: (req_id, query_len) in the order of rows. Runs it whole, then each view by itself."""
        query = torch.randn(metadata.num_tokens, 4, 8)
        key, value = torch.randn(2, metadata.num_tokens, 2, 8)  # padding keeps these
        expected, start = torch.zeros_like(query), 0
        for req_id, query_len in step:
            rows = slice(start, start + query_len)
            key[rows], value[rows] = self.say(req_id, query_len)
            expected[rows] = dense_attention(query[rows], *self.said[req_id], **self.features)
            start += query_len
        output = self.impl.forward(query, key, value, self.cache, metadata)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
        parts = [metadata.prefill_metadata, metadata.decode_metadata]
        if metadata.decodes_first:
            parts.reverse()
        start = 0
        for part in filter(None, parts):
            rows = slice(start, start + part.num_tokens)
            output = self.impl.forward(query[rows], key[rows], value[rows], self.cache, part)
            torch.testing.assert_close(output, expected[rows], atol=2e-5, rtol=2e-5)
            start += part.num_tokens
        assert start == metadata.num_tokens


@settings(max_examples=15, deadline=None)
@given(data=st.data(), window=st.sampled_from([None, 1, 4, 6]))
def test_persistent_builder(data, window):
    torch.manual_seed(0)
    engine = Engine(window)
    batch = InputBatch(max_num_reqs=4, max_model_len=40, block_size=BLOCK)
    builder = MetadataBuilder(batch, engine.backend, max_num_batched_tokens=80)
    for step in range(8):
        for req_id in [r for r in batch.req_ids if data.draw(st.integers(0, 9)) == 0 or len(engine.said[r][0]) > 30]:
            engine.take_back(batch.remove_request(req_id))
            del engine.said[req_id]
        scheduled = {req_id: data.draw(st.sampled_from([0, 1, 1, 1, 2, 5])) for req_id in batch.req_ids}
        if batch.num_reqs < 4:
            scheduled[step] = data.draw(st.integers(1, 9))
            batch.add_request(step, [])
        for req_id, query_len in scheduled.items():
            held = len(batch.block_ids(req_id))
            batch.append_blocks(req_id, engine.blocks(batch.num_computed_tokens(req_id) + query_len, held))
        metadata = builder.build(scheduled)
        engine.check(metadata, [(req_id, scheduled[req_id]) for req_id in metadata.req_ids])


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3, 4, 8]),
    chunk=st.sampled_from([None, 5]),
    pad=st.integers(-1, 2),
)
def test_list_builder(prompts, window, chunk, pad):
    """Prompts one after another, each beside the decodes of those before; then decodes, padded as for a graph."""
    torch.manual_seed(0)
    engine = Engine(window)
    builder = CommonMetadataBuilder(
        BLOCK,
        sliding_window=window,
        chunked_prefill=chunk is not None,
        max_seq_len_to_capture=64,
        backend=engine.backend,
    )
    tables, lengths = {}, {}

    def run(chunks, decodes, pad=-1):
        step = [(i, n) for i, n in chunks.items()] + [(i, 1) for i in decodes]
        groups = []
        for req_id, query_len in step:
            context = lengths.get(req_id, 0)
            table = tables.setdefault(req_id, [])
            table += engine.blocks(context + query_len, len(table))
            groups.append(SequenceGroup(req_id in chunks, [Sequence(req_id, query_len, context, list(table))]))
            lengths[req_id] = context + query_len
        engine.check(builder.build(groups, pad), step)

    for i, prompt in enumerate(prompts):
        for start in range(0, prompt, chunk or prompt):
            run({i: min(prompt - start, chunk or prompt)}, range(i))
    for _ in range(6):
        run({}, range(len(prompts)), pad)


@pytest.mark.parametrize("window", [None, 4])
def test_profiling_run_of_the_list_builder(window):
    engine = Engine(window)
    builder = CommonMetadataBuilder(BLOCK, sliding_window=window, backend=engine.backend)
    engine.check(
        builder.build([SequenceGroup(True, [Sequence(0, 9, 0, None), Sequence(1, 3, 0, None)])]), [(0, 9), (1, 3)]
    )
    assert engine.cache[:, :-1].isnan().all()
