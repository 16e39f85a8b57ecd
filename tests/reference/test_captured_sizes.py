"""Captured sizes of the persistent builder, replayed by the stand-in over `reference`, which reads host arrays, too."""

import random

import pytest
import torch

from attncore import BackendConfig, graphs
from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.reference import ReferenceBackend

GROUPS = [KVCacheGroup("full", 8, kernel_block_size=4), KVCacheGroup("window", 4, sliding_window=6)]
SIZES = {3: 1, 2: 2}  # requests: tokens of each


class Engine:
    def __init__(self, transport, depth):
        self.batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=GROUPS)
        configs = [BackendConfig(2, 1, 8, "float32", 4, sliding_window=group.sliding_window) for group in GROUPS]
        backends = {group.name: ReferenceBackend(config) for group, config in zip(GROUPS, configs, strict=True)}
        self.builder = MetadataBuilder(
            self.batch, backends, max_num_batched_tokens=64, decode_threshold=2, transport=transport, depth=depth
        )
        self.impls = {
            group.name: backends[group.name].impl(group.name, scale=0.3, sliding_window=group.sliding_window)
            for group in GROUPS
        }
        self.caches = {name: backend.allocate_kv_cache(300) for name, backend in backends.items()}
        self.captured = {size: self.capture(size, each) for size, each in SIZES.items()}

    def forward(self, name, tensors, metadata):
        return self.impls[name].forward(*tensors, self.caches[name], metadata.groups[name])

    def capture(self, size, each):
        metadata = self.builder.capture(size, each)
        tensors = [torch.randn(size * each, heads, 8) for heads in (2, 1, 1)]
        graph = graphs.new_graph("cpu")
        with graphs.capturing(graph):
            metadata.record()
            outputs = {name: graphs.launch(self.forward, name, tensors, metadata) for name in self.impls}
        return graph, tensors, outputs, metadata


@pytest.mark.parametrize(("transport", "depth"), [("auto", 1), ("auto", 2), ("auto", 3), ("copy", 2)])
@pytest.mark.parametrize("poison", ["", "1"])
def test_a_replay_is_what_the_step_s_own_metadata_gives(transport, depth, poison, monkeypatch):
    monkeypatch.setenv("ATTNCORE_POISON", poison or "0")
    torch.manual_seed(0)
    rng, engine = random.Random(0), Engine(transport, depth)
    batch, fresh = engine.batch, iter(range(1, 140))
    for index, name in enumerate("abc"):
        blocks = {"full": [next(fresh) for _ in range(8)], "window": [next(fresh) for _ in range(16)]}
        batch.add_request(name, blocks, 3 * index + 1)
    for step in range(25):
        size = rng.choice(sorted(SIZES))
        running = rng.sample("abc", rng.randint(1, size))
        metadata = engine.builder.build({name: SIZES[size] * (name in running) for name in "abc"}, bucket=size)
        graph, tensors, outputs, captured = engine.captured[size]
        for tensor in tensors:
            tensor.normal_()
        metadata.replay(graph)
        for name, output in outputs.items():
            torch.testing.assert_close(output, engine.forward(name, tensors, metadata))
            assert captured.groups[name].paged_kv_indices.tolist() == metadata.groups[name].paged_kv_indices.tolist()
        assert captured.host.seq_lens.tolist() == metadata.host.seq_lens.tolist()
        assert (captured.max_seq_len, captured.num_reqs, captured.req_ids) == (64, size, ())
        batch.rollback_many({name: rng.randint(0, SIZES[size] - 1) for name in running})
        if step % 4 == 0:
            batch.release_passed_blocks()
