"""Steps on a CUDA device: every field there is the host's, the tables follow, graphs find their steps again."""

import gc

import numpy as np
import oracles
import pytest
import torch
from batches import Batches
from builder.plain_backend import Least
from hypothesis import HealthCheck, settings
from late_verdicts import GROUPS, drafts_judged_late

from attncore import (
    ATTNCORE_API,
    BackendConfig,
    BackendSpec,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    MultipleOf,
)
from attncore.errors import CaptureError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class OnCuda(Least):
    name = "on-cuda"


def on_cuda(block_size, *, page_list=False):
    spec = None
    if page_list:
        spec = BackendSpec(
            name="on-cuda", api=ATTNCORE_API, factory="nowhere:OnCuda", devices={"cuda": 1}, dtypes={"float32"},
            head_sizes={8}, block_sizes=MultipleOf(1), device_needs={"paged_kv_indices"},
            cuda_graph="always",
        )  # fmt: skip
    return OnCuda(
        BackendConfig(
            num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", block_size=block_size, device="cuda", spec=spec
        )
    )


class CudaBatches(Batches):
    transports = ("graph", "copy")

    def captured_now(self, size, metadata):
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(metadata.positions)
        gc.disable()  # graphs of an earlier life that are destroyed during a capture spoil it
        with torch.cuda.graph(graph):
            metadata.record()
            out.copy_(metadata.positions)
        gc.enable()
        vars(self).setdefault("graphs", {})[size] = graph, out

    def run(self, size, metadata):
        graph, out = self.graphs[size]
        metadata.replay(graph)
        assert out.tolist() == metadata.host.positions.tolist()

    def backend(self):
        world = self.ranks.world_size if self.ranks else 1
        return {group.name: on_cuda(group.tokens_per_column // world, page_list=world == 1) for group in self.groups}


TestCudaBatches = CudaBatches.TestCase
TestCudaBatches.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

BLOCK, WIDTH_TOKENS = 16, 1024


def read_cache(metadata, cache, out):
    """A model's stand-in: fixed shapes, the device's fields only. Each row's sum over its cached tokens."""
    table = metadata.block_table
    slots = (table.long()[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten(1)
    seen = torch.arange(slots.shape[1], device="cuda") < metadata.seq_lens[:, None]
    out[: len(table)] = (cache[slots] * seen).sum(1)
    written = metadata.slot_mapping
    cache[written] = cache[written] + 1  # -1 is the last slot, in a block that is not compared


def run(requests, steps, seed, sizes, transport, depth, eager_every=7):
    rng = np.random.default_rng(seed)
    batch = InputBatch(max_num_reqs=max(sizes), max_model_len=WIDTH_TOKENS, block_size=BLOCK)
    builder = MetadataBuilder(batch, on_cuda(BLOCK), max_num_batched_tokens=512, transport=transport, depth=depth)
    assert builder.transport == transport, builder.why_transport
    num_blocks = 4096
    cache = torch.randint(0, 1000, (num_blocks * BLOCK + BLOCK,), device="cuda")
    out = torch.zeros(max(sizes), dtype=torch.int64, device="cuda")
    mirror = cache.clone()
    graphs = {}
    for size in sizes:
        metadata = builder.capture(size)
        read_cache(metadata, cache, out)  # warms up, over a step without rows
        torch.cuda.synchronize()
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size]):
            metadata.record()
            read_cache(metadata, cache, out)
    assert builder.captured == tuple(sorted(sizes))
    mirror[-BLOCK:] = cache[-BLOCK:]
    free = list(rng.permutation(np.arange(1, num_blocks)))
    blocks, computed, wrong, name = {}, {}, [], 0
    for step in range(steps):
        while len(batch) < requests and rng.random() < 0.5:
            length = int(rng.integers(1, 900))
            blocks[name] = [int(free.pop()) for _ in range(length // BLOCK + 1)]
            computed[name] = length
            batch.add_request(name, blocks[name], length)
            name += 1
        for req_id in [r for r in computed if computed[r] >= WIDTH_TOKENS - 2 or rng.random() < 0.02]:
            free[:0] = batch.remove_request(req_id)
            del blocks[req_id], computed[req_id]
        for req_id in batch.needs_block():
            blocks[req_id].append(int(free.pop()))
            batch.append_blocks(req_id, blocks[req_id][-1:])
        resting = {r: 0 for r in computed if rng.random() < 0.05}
        running = len(computed) - len(resting)
        size = next((size for size in sorted(sizes) if size >= running), None)
        if rng.random() < 0.3:
            torch.cuda._sleep(int(rng.integers(1, 2_000_000)))  # the device falls behind
        if size is None or step % eager_every == 0:
            metadata = builder.build(resting)
            read_cache(metadata, cache, out)
        else:
            metadata = builder.build(resting, bucket=size)
            metadata.replay(graphs[size])
        # The same from the host's own lists, in stream order, without a look at the metadata's device fields.
        ids = list(metadata.req_ids)
        expected = torch.zeros(len(ids), dtype=torch.int64, device="cuda")
        for row, req_id in enumerate(ids):
            slots = oracles.slots_of(blocks[req_id], 0, computed[req_id] + 1, BLOCK)
            expected[row] = mirror[torch.tensor(slots).cuda()].sum()
        for req_id in ids:
            slot = oracles.slots_of(blocks[req_id], computed[req_id], computed[req_id] + 1, BLOCK)[0]
            mirror[slot] += 1
            computed[req_id] += 1
        wrong.append((out[: len(ids)] != expected).sum())
    return torch.stack(wrong).cpu(), cache[:-BLOCK], mirror[:-BLOCK]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_graphs_replay_what_eager_steps_would(transport, depth):
    wrong, cache, mirror = run(12, 300, seed=depth, sizes=(1, 4, 8, 12), transport=transport, depth=depth)
    assert wrong.sum() == 0
    assert torch.equal(cache, mirror)


@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_page_indices_are_there_in_a_graph(transport):
    batch = InputBatch(max_num_reqs=3, max_model_len=8192, block_size=BLOCK)
    builder = MetadataBuilder(batch, on_cuda(BLOCK, page_list=True), max_num_batched_tokens=64, transport=transport)
    assert builder.transport == transport
    batch.add_request("a", range(1, 501), 7990)
    batch.add_request("b", [600, 601], 17)
    graph = torch.cuda.CUDAGraph()
    metadata = builder.capture(3)
    buffer = builder._assembly.side.page_buffer(0)
    out = torch.zeros(600, dtype=torch.int32, device="cuda")
    with torch.cuda.graph(graph):
        metadata.record()
        out.copy_(buffer[:600])
    for step in range(5):
        metadata = builder.build(bucket=3)
        metadata.replay(graph)
        expected = [*range(1, -(-(7991 + step) // BLOCK) + 1), 600, 601]
        assert out[: len(expected)].tolist() == metadata.paged_kv_indices.tolist() == expected


def test_each_build_for_a_graph_is_replayed_once():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK)
    builder = MetadataBuilder(batch, on_cuda(BLOCK), max_num_batched_tokens=64, transport="graph")
    batch.add_request("a", [1], 3)
    graph, seen = torch.cuda.CUDAGraph(), torch.zeros(2, dtype=torch.int32, device="cuda")
    metadata = builder.capture(2)
    with torch.cuda.graph(graph):
        metadata.record()
        seen.copy_(metadata.seq_lens)
    with pytest.raises(CaptureError, match="step 0 is not waiting for a replay"):
        metadata.replay(graph)
    metadata = builder.build(bucket=2)
    with pytest.raises(CaptureError, match="step 1 was built for a graph of 2 requests and not replayed"):
        builder.build()
    metadata.abandon()
    assert batch.num_computed_tokens("a") == 3
    metadata = builder.build(bucket=2)
    metadata.replay(graph)
    assert seen.tolist() == [4, 0]
    with pytest.raises(CaptureError, match="not waiting for a replay"):
        metadata.replay(graph)
    with pytest.raises(CaptureError, match="nothing is to be taken back"):
        metadata.abandon()
    builder.build_empty(2).replay(graph)
    assert seen.tolist() == [0, 0]
    graph.replay()  # by itself: no arena is there, so no rows, and the next step is not disturbed
    assert seen.tolist() == [0, 0]
    builder.build(bucket=2).replay(graph)
    assert seen.tolist() == [5, 0]
    builder.capture(3)
    with pytest.raises(CaptureError, match=r"call metadata\.record"):
        builder.build(bucket=3).replay(graph)


@pytest.mark.parametrize("transport", ["graph", "copy"])
@pytest.mark.parametrize("seed", range(4))
def test_overlapping_steps_know_exact_lengths(transport, seed):
    backends = {group.name: on_cuda(group.tokens_per_column) for group in GROUPS}
    drafts_judged_late("cython", seed, device="cuda", transport=transport, backend=backends)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_a_ticket_an_engine_replays_by_itself(depth):
    rng = np.random.default_rng(depth)
    batch = InputBatch(max_num_reqs=4, max_model_len=4096, block_size=BLOCK)
    builder = MetadataBuilder(
        batch, on_cuda(BLOCK), max_num_batched_tokens=64, transport="graph", ticket=True, depth=depth
    )
    batch.add_request("a", [7], 3)
    graph, seen = torch.cuda.CUDAGraph(), torch.zeros(2, dtype=torch.int32, device="cuda")
    held = torch.zeros(256, dtype=torch.int32, device="cuda")
    metadata = builder.capture(2)
    with torch.cuda.graph(graph):
        metadata.record()
        seen.copy_(metadata.seq_lens)
        held.copy_(metadata.block_table[0])
    got, expected, tables, blocks = [], [], [], []
    for step in range(300):
        for req_id in batch.needs_block():
            batch.append_blocks(req_id, [100 + step])
        if rng.random() < 0.2:
            torch.cuda._sleep(int(rng.integers(1, 500_000)))
        metadata = builder.build(bucket=2) if step % 5 else builder.build()
        if step % 5:
            if step % 16 in (7, 13, 14):
                continue  # dropped: never replayed
            graph.replay()
            got.append(seen.clone())
            expected.append([batch.num_computed_tokens("a"), 0])
            tables.append(held.clone())
            blocks.append(batch.block_ids("a"))
        else:
            got.append(torch.cat([metadata.seq_lens, metadata.seq_lens * 0]))
            expected.append([batch.num_computed_tokens("a"), 0])
        if step % 20 == 3:
            graph.replay()  # a dummy: no ticket, no rows
            got.append(seen.clone())
            expected.append([0, 0])
    assert torch.stack(got).tolist() == expected
    for table, ids in zip(torch.stack(tables).tolist(), blocks, strict=True):
        assert table[: len(ids)] == ids


def test_nothing_is_captured_by_a_build():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=BLOCK)
    builder = MetadataBuilder(batch, on_cuda(BLOCK), max_num_batched_tokens=64)
    batch.add_request("a", [1], 3)
    builder.capture(2)
    graph = torch.cuda.CUDAGraph()
    kept = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        kept += 1
        for call in (builder.build, lambda: builder.build(bucket=2), lambda: builder.capture(3)):
            with pytest.raises(CaptureError, match="a stream is capturing"):
                call()
    assert batch.num_computed_tokens("a") == 3
    assert builder.build().seq_lens.tolist() == [4]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_a_step_does_not_synchronise(transport):
    groups = [KVCacheGroup("full", 16), KVCacheGroup("window", 16, sliding_window=64)]
    batch = InputBatch(max_num_reqs=8, max_model_len=256, groups=groups)
    builder = MetadataBuilder(
        batch,
        {name: on_cuda(16) for name in ("full", "window")},
        max_num_batched_tokens=256,
        depth=3,
        transport=transport,
    )
    for i in range(6):
        batch.add_request(i, {name: range(1 + 16 * i, 17 + 16 * i) for name in ("full", "window")}, 10 * i)
    graph, kept = torch.cuda.CUDAGraph(), torch.zeros(8, dtype=torch.int32, device="cuda")
    metadata = builder.capture(8)
    with torch.cuda.graph(graph):
        metadata.record()
        kept.copy_(metadata.seq_lens)
    metadata = builder.build({0: 5})
    for view in (metadata.decode_metadata, metadata.prefill_metadata):
        _ = view.paged_kv_indices
    builder.build(bucket=8).replay(graph)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            metadata = builder.build({step % 6: 3})
            for view in (metadata.decode_metadata, metadata.prefill_metadata):
                for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table", "paged_kv_indptr"):
                    assert getattr(view, name).is_cuda
                assert view.paged_kv_indices.is_cuda
            builder.build(bucket=8).replay(graph)
    finally:
        torch.cuda.set_sync_debug_mode("default")
