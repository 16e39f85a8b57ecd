"""Encoder/decoder steps of both builders: every type of attention of a model, against all that was said and encoded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncore import (
    AttentionType,
    BackendConfig,
    CommonMetadataBuilder,
    InputBatch,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
)
from attncore.builder import KVCacheGroup
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend

BLOCK, NUM_BLOCKS = 4, 64
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


class Model:
    """A layer of each type, a cache for the decoder's and one for the encoder's keys, and all that requests said."""

    def __init__(self):
        config = BackendConfig(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32", block_size=BLOCK)
        self.backend = ReferenceBackend(config)
        self.impls = {kind: self.backend.impl("layer", scale=0.3, attn_type=kind) for kind in AttentionType}
        self.caches = [self.backend.allocate_kv_cache(NUM_BLOCKS).fill_(torch.nan) for _ in range(2)]
        self.free = [torch.randperm(NUM_BLOCKS - 1).add(1).tolist() for _ in range(2)]
        self.said, self.encoded = {}, {}

    def blocks(self, cache, num_tokens, held=0):
        return [self.free[cache].pop() for _ in range(-(-num_tokens // BLOCK) - held)]

    def run(self, step, metadata, cross_metadata=None):
        """``step``: (req_id, query_len, encoder tokens that run) in the order of rows. Padding is any number."""
        cross_metadata = cross_metadata or metadata
        encoder = sum(count for _, _, count in step)
        assert len(metadata.cross_slot_mapping) == encoder
        total = len(metadata.slot_mapping)
        query, key, value = (torch.randn(total, heads, 8) for heads in (4, 2, 2))
        new_query, new_key, new_value = (torch.randn(encoder, heads, 8) for heads in (4, 2, 2))
        wanted = {kind: torch.zeros(total, 4, 8) for kind in ("decoder", "encoder_decoder")}
        wanted["encoder"] = torch.zeros(encoder, 4, 8)
        start = fresh = 0
        for req_id, query_len, count in step:
            tokens, new = slice(start, start + query_len), slice(fresh, fresh + count)
            start, fresh = tokens.stop, new.stop
            if count:
                self.encoded[req_id] = (new_key[new], new_value[new])
                wanted["encoder"][new] = dense_attention(
                    new_query[new], new_key[new], new_value[new], scale=0.3, causal=False
                )
            old = self.said.get(req_id, (key[:0], value[:0]))
            self.said[req_id] = torch.cat((old[0], key[tokens])), torch.cat((old[1], value[tokens]))
            wanted["decoder"][tokens] = dense_attention(query[tokens], *self.said[req_id], scale=0.3)
            if req_id in self.encoded:
                wanted["encoder_decoder"][tokens] = dense_attention(
                    query[tokens], *self.encoded[req_id], scale=0.3, causal=False
                )
        found = {
            "encoder": self.impls["encoder"].forward(new_query, new_key, new_value, None, metadata),
            "decoder": self.impls["decoder"].forward(query, key, value, self.caches[0], metadata),
            "encoder_decoder": self.impls["encoder_decoder"].forward(
                query, new_key if encoder else None, new_value if encoder else None, self.caches[1], cross_metadata
            ),
        }
        for kind, output in found.items():
            torch.testing.assert_close(output, wanted[kind], **CLOSE, msg=lambda text, kind=kind: f"{kind}: {text}")


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 13)), min_size=1, max_size=4),
    mixed=st.booleans(),
    layout=st.sampled_from(["common", "flash", "rocm"]),
    pad=st.integers(-1, 2),
)
def test_list_builder(prompts, mixed, layout, pad):
    """Prompts together, or each beside the decodes of those before; then decodes, padded as for a graph."""
    torch.manual_seed(0)
    model = Model()
    builder = CommonMetadataBuilder(
        BLOCK, layout, backend=model.backend, encoder_decoder=True, max_seq_len_to_capture=64,
        max_encoder_seq_len_to_capture=16,
    )  # fmt: skip
    tables, crosses = {}, {}

    def run(new, decodes, pad=-1):
        groups, step = [], []
        for req_id in (*new, *decodes):
            query_len, encoder = prompts[req_id] if req_id in new else (1, prompts[req_id][1])
            context = len(model.said[req_id][0]) if req_id in decodes else 0
            table = tables.setdefault(req_id, [])
            table += model.blocks(0, context + query_len, len(table))
            cross = crosses.setdefault(req_id, model.blocks(1, encoder) if req_id in new else None)
            sequences = [Sequence(req_id, query_len, context, list(table))]
            groups.append(SequenceGroup(req_id in new, sequences, False, encoder, cross))
            step.append((req_id, query_len, encoder if req_id in new else 0))
        model.run(step, builder.build(groups, pad))

    everybody = range(len(prompts))
    if mixed:
        for req_id in everybody:
            run([req_id], range(req_id))
    else:
        run(everybody, [])
    for _ in range(3):
        run([], everybody, pad)


def test_profiling_run_of_the_list_builder():
    model = Model()
    builder = CommonMetadataBuilder(BLOCK, backend=model.backend, encoder_decoder=True)
    groups = [SequenceGroup(True, [Sequence(i, 5 + i, 0, None)], False, 9 + i, None) for i in range(2)]
    metadata = builder.build(groups)
    model.run([(0, 5, 9), (1, 6, 10)], metadata)
    assert all(cache[:, :-1].isnan().all() for cache in model.caches)
    model.caches = [None, None]
    model.run([(2, 5, 9), (3, 6, 10)], metadata)


def test_a_view_of_a_mixed_step_of_the_list_builder_is_refused():
    model = Model()
    builder = CommonMetadataBuilder(BLOCK, backend=model.backend, encoder_decoder=True)
    groups = [
        SequenceGroup(True, [Sequence(0, 3, 0, [1])], False, 5, [1, 2]),
        SequenceGroup(False, [Sequence(1, 1, 2, [2])], False, 6, [3, 4]),
    ]
    view = builder.build(groups).decode_metadata
    cross = model.impls["encoder_decoder"]
    with pytest.raises(
        ValueError, match=r"^metadata: encoder_seq_lens has 2 rows for 1 request; views of a mixed step"
    ):
        cross.forward(torch.zeros(1, 4, 8), torch.zeros(5, 2, 8), torch.zeros(5, 2, 8), model.caches[1], view)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), through_group=st.booleans(), bucket=st.booleans())
def test_persistent_builder(data, through_group, bucket):
    """Requests come and go; a cross layer takes the step, or the step as its group sees it."""
    torch.manual_seed(0)
    model = Model()
    groups = [KVCacheGroup("self", BLOCK), KVCacheGroup("cross", BLOCK, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=40, groups=groups, max_encoder_len=13)
    backends = {"self": model.backend, "cross": model.backend}
    builder = MetadataBuilder(batch, backends, max_num_batched_tokens=80)
    if bucket:
        builder.capture(4)
    for step in range(6):
        for req_id in [r for r in batch.req_ids if data.draw(st.integers(0, 5)) == 0]:
            freed = batch.remove_request(req_id)
            for cache, name in enumerate(("self", "cross")):
                model.caches[cache][:, freed[name]] = torch.nan
                model.free[cache] += freed[name]
            del model.said[req_id]
            model.encoded.pop(req_id, None)
        scheduled = {req_id: data.draw(st.sampled_from([1, 1, 1, 1, 0, 3])) for req_id in batch.req_ids}
        fresh = {}
        if not batch.num_reqs or (batch.num_reqs < 4 and data.draw(st.booleans())):
            fresh[step] = data.draw(st.sampled_from([0, 1, 4, 13]))
            scheduled[step] = data.draw(st.integers(1, 9))
            cross = model.blocks(1, fresh[step])
            batch.add_request(step, {"self": [], "cross": cross}, encoder_seq_len=fresh[step])
        for req_id, query_len in scheduled.items():
            held = len(batch.block_ids(req_id)["self"])
            more = model.blocks(0, batch.num_computed_tokens(req_id) + query_len, held)
            batch.append_blocks(req_id, {"self": more, "cross": []})
        decodes = bucket and bool(scheduled) and set(scheduled.values()) == {1} and not any(fresh.values())
        metadata = builder.build(scheduled, bucket=4 if decodes else None)
        assert metadata.num_reqs == (4 if decodes else len(metadata.req_ids))
        rows = [(req_id, scheduled[req_id], fresh.get(req_id, 0)) for req_id in metadata.req_ids]
        model.run(rows, metadata, metadata.groups["cross"] if through_group else None)
