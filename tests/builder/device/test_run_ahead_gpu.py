"""Steps ahead on a CUDA device: graphs of one step and of several see what would be built one by one."""

import gc

import pytest
import torch
from builder.device.ahead_engine import GROUPS, OF_GROUP, OF_STEP, AheadEngine
from builder.plain_backend import Least

from attncore import ATTNCORE_API, BackendConfig, BackendSpec, MultipleOf
from attncore.builder.fields import DERIVED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class OnCuda(Least):
    name = "on-cuda"


def on_cuda(block_size, needs):
    spec = BackendSpec(
        name="on-cuda", api=ATTNCORE_API, factory="nowhere:OnCuda", devices={"cuda": 1}, dtypes={"float32"},
        head_sizes={8}, block_sizes=MultipleOf(1), device_needs=needs, cuda_graph="always",
    )  # fmt: skip
    return OnCuda(
        BackendConfig(
            num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=block_size, device="cuda", spec=spec
        )
    )


class Captured:
    """A graph of some steps, each of which keeps what it sees."""

    def __init__(self, metadata, count):
        self.count, self.kept = count, [{} for _ in range(count)]
        self.fields = {}
        for group, of_group in metadata.groups.items():
            for name in (*OF_STEP, *OF_GROUP):
                if name == "paged_kv_indices":
                    self.fields[group, name] = of_group.page_buffer
                elif name != "slot_mapping" or hasattr(of_group, name):
                    self.fields[group, name] = getattr(of_group, name)
        self.kept = [{key: torch.zeros_like(field) for key, field in self.fields.items()} for _ in range(count)]
        self.graph, self.replayed = torch.cuda.CUDAGraph(), False
        torch.cuda.synchronize()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(self.graph):
                for step in range(count):
                    metadata.record_next() if step else metadata.record()
                    for (group, name), field in self.fields.items():
                        if name in DERIVED:  # it has no address of its own: the graph computes it
                            field = getattr(metadata.groups[group], name)
                        self.kept[step][group, name].copy_(field)
        finally:
            gc.enable()

    def replay(self):
        self.graph.replay()
        self.replayed = True

    def take(self):
        """What the steps of the last replay saw, where there was one since the last call."""
        replayed, self.replayed = self.replayed, False
        return [self.seen(kept) for kept in self.kept] if replayed else []

    def seen(self, kept):
        seen = {key: field.tolist() for key, field in kept.items()}
        for group, name in seen:
            if name == "paged_kv_indices":
                seen[group, name] = seen[group, name][: seen[group, "paged_kv_indptr"][-1]]
        return seen


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("transport", ["graph", "copy"])
@pytest.mark.parametrize("needs", [{"paged_kv_indices"}, {"paged_kv_indices", "seq_lens", "paged_kv_last_page_len"}])
def test_steps_ahead_are_those_that_would_be_built(groups, depth, transport, needs):
    backend = {group.name: on_cuda(group.tokens_per_column, needs) for group in GROUPS[groups]}
    engine = AheadEngine(depth, groups=groups, depth=depth, transport=transport, backend=backend, new_graph=Captured)
    assert engine.builder.transport == transport
    while engine.steps < 200:
        engine.turn()


def test_a_replay_too_many_sees_no_rows():
    backend = on_cuda(4, {"paged_kv_indices", "seq_lens"})  # of a field that is not declared it sees the last step's
    engine = AheadEngine(0, transport="graph", backend=backend, new_graph=Captured)
    while not len(engine.batch):
        engine.turn()
    engine.give_blocks(3)
    steps, graph = engine.builder.run_ahead(3, bucket=6), engine.graphs[6, 1]
    for _ in range(3):
        steps.replay(graph)
    graph.replay()
    (seen,) = graph.take()
    assert not any(seen["decoder", "seq_lens"])
    assert set(seen["decoder", "slot_mapping"]) == {-1}
    engine.give_blocks(1)
    engine.builder.build(bucket=6).replay(graph)
    assert seen != graph.take()[0]
