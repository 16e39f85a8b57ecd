"""`reference` over bidirectional spans, against masks written out token by token."""

import itertools

import numpy as np
import pytest
import torch
from builder.persistent.test_spans import new_batch

from attncore import BackendConfig, graphs, select
from attncore.builder import MetadataBuilder, metadata_from_fields
from attncore.dense import dense_attention
from attncore.reference import ReferenceBackend

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 3},
    "wide window": {"sliding_window": 11},
    "slopes": {"alibi_slopes": (0.5, 0.2, -0.3, 1.0)},
    "cap and sinks": {"logits_soft_cap": 2.0, "sinks": (0.1, 1.0, -2.0, 0.0)},
    "all": {"sliding_window": 4, "alibi_slopes": (0.5, 0.2, -0.3, 1.0), "logits_soft_cap": 2.0, "sinks": (0.1,) * 4},
}
TOKENS = 40
SPANS = {"a": [(1, 7), (7, 9), (20, 33)], "b": [(0, 40)], "c": [(10, 11), (12, 30)], "plain": []}
STEPS = [
    {"a": 1, "plain": 30},
    {"a": 8, "c": 12},
    {"a": 11, "b": 40, "c": 18, "plain": 1},
    {"a": 13, "c": 10, "plain": 9},
    {"a": 7},
]
"""Tokens of each request, step after step, that cut no span."""


class Engine:
    """Requests whose whole prompts are known: what each token gives over those that its masks say it sees."""

    def __init__(self, features, *, transport="auto", **config):
        self.features = {"scale": 0.4} | features
        config = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE} | config
        config = BackendConfig(dtype="float32", block_size=BLOCK, **config)
        self.config, self.backend = config, ReferenceBackend(config)
        self.impl = self.backend.impl("layer", **self.features)
        self.cache = self.backend.allocate_kv_cache(64)
        self.batch = new_batch()
        self.builder = MetadataBuilder(self.batch, self.backend, max_num_batched_tokens=128, transport=transport)
        torch.manual_seed(0)
        sizes = (config.head_size, config.head_size, config.head_size_v or config.head_size)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.prompts = {}
        for row, (name, spans) in enumerate(SPANS.items()):
            self.batch.add_request(name, list(range(1 + 10 * row, 11 + 10 * row)))
            self.batch.set_spans(name, spans)
            query, key, value = (torch.randn(TOKENS, n, size) for n, size in zip(heads, sizes, strict=True))
            self.prompts[name] = query, key, key[..., : sizes[2]] if config.use_mla else value

    def run(self, scheduled, *, write=True, lse=False):
        """Output, log-sum-exp and what is expected of a step."""
        metadata = self.builder.build({**dict.fromkeys(SPANS, 0), **scheduled})
        tokens = [
            slice(int(metadata.host.context_lens[row]), int(metadata.host.seq_lens[row]))
            for row in range(metadata.num_reqs)
        ]
        tensors = [
            torch.cat([self.prompts[name][part][some] for name, some in zip(metadata.req_ids, tokens, strict=True)])
            for part in range(3)
        ]
        given = [*tensors[:2], None if self.config.use_mla else tensors[2]]
        if not write:
            self.impl.write_cache(*given[1:], self.cache, metadata)
            given[1:] = None, None
        forward = self.impl.forward_with_lse if lse else self.impl.forward
        found = forward(*given, self.cache, metadata, write=write)
        wanted = [
            self.by_mask(name, position)
            for name, some in zip(metadata.req_ids, tokens, strict=True)
            for position in range(some.start, some.stop)
        ]
        outputs, logarithms = map(torch.cat, zip(*wanted, strict=True))
        return (*(found if lse else (found, None)), outputs, logarithms)

    def by_mask(self, name, position):
        """One token over the keys that it sees, whose distances make the slopes' part of a score."""
        query, key, value = self.prompts[name]
        window, slopes = self.features.get("sliding_window"), self.features.get("alibi_slopes")
        seen = [
            j
            for j in range(TOKENS)
            if (j <= position and (window is None or position - j < window))
            or any(a <= position < b and a <= j < b for a, b in SPANS[name])
        ]
        rest = {k: v for k, v in self.features.items() if k not in ("sliding_window", "alibi_slopes")}
        if slopes is None:
            return dense_attention(
                query[position, None], key[seen], value[seen], causal=False, return_lse=True, **rest
            )  # fmt: skip
        outputs, logarithms = [], []
        for head in range(HEADS):
            keys = key[seen, head // (HEADS // KV_HEADS)]
            score = keys @ query[position, head] * rest["scale"]
            if cap := rest.get("logits_soft_cap"):
                score = cap * torch.tanh(score / cap)
            score = score - slopes[head] * torch.tensor([abs(position - j) for j in seen]).float()
            total = torch.logsumexp(score, 0)
            if sinks := rest.get("sinks"):
                total = torch.logaddexp(total, torch.tensor(sinks[head]))
            outputs.append(torch.exp(score - total) @ value[seen, head // (HEADS // KV_HEADS)])
            logarithms.append(total)
        return torch.stack(outputs)[None], torch.stack(logarithms)[None]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_tokens_of_a_span_see_all_of_it(features, transport):
    engine = Engine(features, transport=transport)
    for scheduled in STEPS:
        found, _, wanted, _ = engine.run(scheduled)
        close(found, wanted)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("features", ["plain", "all"])
def test_log_sum_exp_and_keys_that_are_written_already(features, write):
    engine = Engine(FEATURES[features])
    for scheduled in STEPS:
        found, lse, wanted, logarithms = engine.run(scheduled, write=write, lse=True)
        close(found, wanted)
        close(lse, logarithms)


@pytest.mark.parametrize(
    "config",
    [{"num_kv_heads": 1, "head_size": 12, "head_size_v": 8, "use_mla": True}, {"head_size_v": 4}],
    ids=["latent", "short values"],
)
def test_other_caches(config):
    engine = Engine({}, **config)
    for scheduled in STEPS:
        found, _, wanted, _ = engine.run(scheduled)
        close(found, wanted)


@pytest.mark.parametrize("window", [None, 5])
def test_queries_that_go_in_chunks(monkeypatch, window):
    """Bounded temporaries: a chunk of queries sees the keys of its spans, wherever they begin and end."""
    monkeypatch.setattr("attncore.reference.causal.CPU_ELEMENTS", 200)
    engine = Engine({"sliding_window": window} if window else {})
    for scheduled in STEPS:
        found, _, wanted, _ = engine.run(scheduled)
        close(found, wanted)


def test_a_graph_over_a_captured_size_sees_each_steps_spans():
    """The stand-in's graph, captured over a step without spans, runs with the ends of the step it is replayed for."""
    engine = Engine({})
    engine.builder._backends.graph_level = lambda: ("always", "reference")  # of kernels that read the device alone
    tensors = [torch.cat([prompt[part] for prompt in engine.prompts.values()])[:48] for part in range(3)]
    captured = engine.builder.capture(2, num_tokens=48)
    graph = graphs.new_graph("cpu")
    with graphs.capturing(graph):
        captured.record()
        output = graphs.launch(engine.impl.forward, *tensors, engine.cache, captured)
    rests, seen = dict.fromkeys(("b", "plain"), 0), []
    for spans in ([], [(0, 4)], [(1, 7), (7, 20)]):
        engine.batch.set_spans("a", spans)
        engine.batch.set_spans("c", spans[-1:])
        metadata = engine.builder.build({"a": 20, "c": 20, **rests}, bucket=(2, 48))
        metadata.replay(graph)
        eager = engine.impl.forward(*tensors, engine.cache, metadata)
        close(output, eager)
        engine.batch.rollback_many({"a": 20, "c": 20})
        seen.append(output.clone())
    assert not any(torch.allclose(one, other) for one, other in itertools.pairwise(seen))


def test_a_rank_with_a_part_of_the_keys_is_refused():
    engine = Engine({})
    fields = engine.builder.build({"a": 9, "b": 0, "c": 0, "plain": 0}).asdict_zerocopy()
    fields["slot_mapping"] = np.where(np.arange(9) % 2, -1, fields["slot_mapping"])
    fields["seq_lens"], fields["seq_start_loc"] = np.array([5], np.int32), np.array([0, 5], np.int32)
    metadata = metadata_from_fields(fields, engine.backend)
    tensors = [torch.randn(9, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS)]
    with pytest.raises(ValueError, match=r"^metadata: row 0 holds a rank's part of its keys, in a step with spans"):
        engine.impl.forward(*tensors, engine.cache, metadata)


def test_the_feature_can_be_asked_for():
    asked = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}
    choice = select(backend="reference", features={"bidirectional_spans"}, **asked)
    batch = new_batch(block_size=choice.block_size)
    builder = MetadataBuilder(batch, choice.create(), max_num_batched_tokens=8)
    batch.add_request("a", [1])
    batch.set_spans("a", [(1, 3)])
    assert builder.build({"a": 4}).span_ends.tolist() == [0, 3, 3, 0]
