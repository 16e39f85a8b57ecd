"""Layers of several kinds, chosen together, run in one batch and are right: compared with dense attention."""

import pytest

import attncore
from attncore import AttentionRequest, AttentionType, InputBatch, MetadataBuilder

torch = pytest.importorskip("torch")

FIELDS = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "backend": "reference"}
KINDS = {
    "full": {},
    "window": {"sliding_window": 5},
    "wide": {"head_size": 24},
    "sinks": {"sinks": True},
    "cross": {"features": {"encoder_decoder"}},
}
LAYERS = {"sliding_window": {"window": 5}, "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}}


class Layer:
    """One layer of a kind, and the keys and values of each request so far."""

    def __init__(self, kind, choice, backends):
        backend = backends[choice.group_of[kind]]
        self.kind, self.group, self.size = kind, choice.group_of[kind], choice[kind].request.head_size
        self.features = {name: by_kind[kind] for name, by_kind in LAYERS.items() if kind in by_kind}
        cross = {"attn_type": AttentionType.ENCODER_DECODER} if kind == "cross" else {}
        self.impl = backend.impl(f"layers.{kind}", scale=0.3, **self.features, **cross)
        self.kv_cache = backend.allocate_kv_cache(40)
        self.keys, self.values = {}, {}

    def check(self, metadata, draw):
        """Run the step, and compare every request with dense attention over its own keys."""
        view = metadata.groups[self.group]
        query = draw(metadata.num_tokens, 4, self.size)
        starts = metadata.host.query_start_loc
        cross = self.kind == "cross"
        fresh = metadata.num_encoder_tokens if cross else metadata.num_tokens
        key, value = draw(fresh, 2, self.size), draw(fresh, 2, self.size)
        found = self.impl.forward(query, key, value, self.kv_cache, view)
        spans = view.host.encoder_query_start_loc if cross else starts
        for row, name in enumerate(metadata.req_ids):
            for store, new in ((self.keys, key), (self.values, value)):
                part = new[spans[row] : spans[row + 1]]
                store[name] = torch.cat((store[name], part)) if name in store else part
            mine = slice(int(starts[row]), int(starts[row + 1]))
            features = {"scale": 0.3, "causal": not cross, **self.features}
            wanted = attncore.dense.dense_attention(query[mine], self.keys[name], self.values[name], **features)
            torch.testing.assert_close(found[mine], wanted, atol=2e-5, rtol=2e-5)


def test_layers_of_five_kinds_are_right_in_one_batch():
    import attncore.dense

    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    asked = {kind: AttentionRequest(**{**FIELDS, "num_blocks": 40, **fields}) for kind, fields in KINDS.items()}
    choice = attncore.select_for_layers(asked, block_size=4)
    groups = choice.kv_cache_groups()
    assert choice.group_of["sinks"] == "full"  # the same configuration, and so the same blocks
    assert [group.name for group in groups] == ["full", "window", "wide", "cross"]
    backends = choice.create()
    batch = InputBatch(max_num_reqs=4, max_model_len=32, max_encoder_len=16, groups=groups)
    builder = MetadataBuilder(batch, backends, max_num_batched_tokens=32)
    layers = [Layer(kind, choice, backends) for kind in KINDS]
    free = {group.name: list(range(39, 0, -1)) for group in groups}

    def blocks(tokens, encoder):
        counts = {name: encoder if name == "cross" else tokens for name in free}
        return {name: [free[name].pop() for _ in range(-(-counts[name] // 4))] for name in free}

    batch.add_request("a", blocks(20, 6), encoder_seq_len=6)
    batch.add_request("b", blocks(20, 3), encoder_seq_len=3)
    for scheduled in ({"a": 9, "b": 5}, {"a": 4}, {}, {}, {"b": 3}):
        metadata = builder.build(scheduled)
        for layer in layers:
            layer.check(metadata, draw)
        batch.release_passed_blocks()
    assert batch.block_ids("a")["window"][:2] == [0, 0]
    assert 0 not in batch.block_ids("a")["full"]
