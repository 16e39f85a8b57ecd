"""`reference` over draft trees, against dense attention over each token's path by itself; and moves of what is kept."""

import numpy as np
import pytest
import torch

from attncore import BackendConfig, graphs, select
from attncore.builder import InputBatch, MetadataBuilder, metadata_from_fields
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
CONTEXTS = {"a": 9, "b": 4, "chain": 6, "new": 0}
TREES = {"a": [-1, -1, 0, 1, 1, 3, 0], "b": [-1, -1, -1], "new": [-1, 0, 0, 2]}
SCHEDULED = {"chain": 3}


class Engine:
    """Requests with random keys in the cache, and of each the keys and values of its tokens by themselves."""

    def __init__(self, features, *, transport="auto", seed=0, **config):
        self.features = {"scale": 0.4} | features
        window = features.get("sliding_window")
        config = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "sliding_window": window} | config
        self.config = BackendConfig(dtype="float32", block_size=BLOCK, **config)
        self.backend = ReferenceBackend(self.config)
        self.impl = self.backend.impl("layer", **self.features)
        self.cache = self.backend.allocate_kv_cache(64)
        self.batch = InputBatch(max_num_reqs=8, max_model_len=128, block_size=BLOCK)
        self.builder = MetadataBuilder(
            self.batch, self.backend, max_num_batched_tokens=128, decode_threshold=64, draft_trees=True,
            transport=transport,
        )  # fmt: skip
        self.random = torch.Generator().manual_seed(seed)
        blocks = iter(np.random.default_rng(seed).permutation(np.arange(1, 64)).tolist())
        self.history = {}
        for name in CONTEXTS:
            self.batch.add_request(name, [next(blocks) for _ in range(6)])
            self.history[name] = [self.draw(0)[1:]]
        self.step(dict(CONTEXTS), {})

    def draw(self, tokens):
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        sizes = (config.head_size, config.head_size, config.head_size_v or config.head_size)
        query, key, value = (
            torch.randn(tokens, number, size, generator=self.random) for number, size in zip(heads, sizes, strict=True)
        )
        return query, key, key[..., : sizes[2]] if config.use_mla else value

    def step(self, scheduled, trees, *, write=True, lse=False):
        """Output, log-sum-exp and what dense attention gives for each token's path; tokens join the history."""
        idle = {name: 0 for name in CONTEXTS if name not in scheduled and name not in trees}
        metadata = self.builder.build({**idle, **scheduled}, trees=trees)
        tensors = self.draw(metadata.num_tokens)
        given = [*tensors[:2], None if self.config.use_mla else tensors[2]]
        if not write:
            self.impl.write_cache(*given[1:], self.cache, metadata)
            given[1:] = None, None
        forward = self.impl.forward_with_lse if lse else self.impl.forward
        found = forward(*given, self.cache, metadata, write=write)
        expected = []
        for row, name in enumerate(metadata.req_ids):
            first, stop = metadata.host.query_start_loc[row : row + 2].tolist()
            (keys, values), parents = map(torch.cat, zip(*self.history[name], strict=True)), trees.get(name)
            for token in range(stop - first):
                path = list(range(token + 1))
                if parents is not None:
                    path = [token]
                    while path[0]:
                        path.insert(0, parents[path[0] - 1] + 1)
                own = first + torch.tensor(path)
                expected.append(
                    dense_attention(
                        tensors[0][first + token, None], torch.cat((keys, tensors[1][own])),
                        torch.cat((values, tensors[2][own])), return_lse=True, **self.features,
                    )
                )  # fmt: skip
            self.history[name].append((tensors[1][first:stop], tensors[2][first:stop]))
        outputs, logarithms = map(torch.cat, zip(*expected, strict=True))
        return (*(found if lse else (found, None)), outputs, logarithms)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_each_token_attends_its_path_alone(features, transport):
    engine = Engine(features, transport=transport)
    found, _, wanted, _ = engine.step(SCHEDULED, TREES)
    close(found, wanted)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("features", ["plain", "all"])
def test_log_sum_exp_and_keys_that_are_written_already(features, write):
    found, lse, wanted, logarithms = Engine(FEATURES[features]).step(SCHEDULED, TREES, write=write, lse=True)
    close(found, wanted)
    close(lse, logarithms)


@pytest.mark.parametrize(
    "config",
    [{"num_kv_heads": 1, "head_size": 12, "head_size_v": 8, "use_mla": True}, {"head_size_v": 4}],
    ids=["latent", "short values"],
)
def test_other_caches(config):
    engine = Engine({}, **config)
    found, _, wanted, _ = engine.step(SCHEDULED, TREES)
    close(found, wanted)


def test_the_largest_tree_and_prompts_beside_it():
    random = np.random.default_rng(0)
    tree = [int(random.integers(-1, draft)) if draft else -1 for draft in range(63)]
    engine = Engine({})
    engine.batch.append_blocks("b", list(range(64, 76)))
    engine.cache = torch.cat((engine.cache, torch.zeros_like(engine.cache)), dim=1)
    found, _, wanted, _ = engine.step({"a": 12, "chain": 1}, {"b": tree})
    close(found, wanted)


def test_a_chain_is_as_drafts_without_a_tree():
    outputs = []
    for scheduled, trees in (({"a": 4}, {}), ({}, {"a": [-1, 0, 1]})):
        outputs.append(Engine({"sliding_window": 3}, seed=3).step(scheduled, trees)[0])
    close(outputs[0], outputs[1])


def test_a_graph_over_a_captured_size_sees_each_steps_trees():
    """The stand-in's graph, captured over a step without trees, runs with the masks of the step it is replayed for."""
    engine = Engine({})
    tensors = engine.draw(8)
    captured = engine.builder.capture(2, query_len=4)
    graph = graphs.new_graph("cpu")
    with graphs.capturing(graph):
        captured.record()
        output = graphs.launch(engine.impl.forward, *tensors, engine.cache, captured)
    for tree in ([-1, -1, 0], [-1, 0, 0], [-1, -1, -1]):
        rests = dict.fromkeys(("chain", "new"), 0)
        metadata = engine.builder.build(rests, trees={"a": tree, "b": tree}, bucket=2)
        metadata.replay(graph)
        close(output, engine.impl.forward(*tensors, engine.cache, metadata))
        causal = engine.impl.forward(*tensors, engine.cache, without_trees(metadata, engine.backend))
        assert not torch.allclose(output, causal)
        engine.batch.rollback_many({"a": 4, "b": 4})


def without_trees(metadata, backend):
    fields = metadata.asdict_zerocopy()
    return metadata_from_fields({name: value for name, value in fields.items() if name != "tree_mask"}, backend)


def test_the_feature_can_be_asked_for():
    asked = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}
    choice = select(backend="reference", features={"tree_mask"}, **asked)
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=choice.block_size)
    builder = MetadataBuilder(
        batch, choice.create(), max_num_batched_tokens=8, decode_threshold=4, draft_trees=True
    )  # fmt: skip
    batch.add_request("a", [1])
    assert builder.build(trees={"a": [-1, -1]}).tree_mask.tolist() == [1, 3, 5]
