"""Fields that no backend declares, on CUDA: asked for in a capture or of an eager step, they are every later step's."""

import gc

import pytest
import torch
from builder.device.test_device_gpu import OnCuda

from attncore import ATTNCORE_API, BackendConfig, BackendSpec, InputBatch, MetadataBuilder, MultipleOf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ASKED = ("token_to_req_indices", "context_lens", "query_lens", "seq_start_loc", "paged_kv_indptr", "paged_kv_num_pages")


def builder_of(transport, **settings):
    spec = BackendSpec(
        name="on-cuda", api=ATTNCORE_API, factory="nowhere:OnCuda", devices={"cuda": 1}, dtypes={"float32"},
        head_sizes={8}, block_sizes=MultipleOf(1), device_needs={"block_table", "seq_lens"}, cuda_graph="always",
    )  # fmt: skip
    config = {"num_heads": 1, "num_kv_heads": 1, "head_size": 8, "dtype": "float32", "block_size": 16}
    batch = InputBatch(max_num_reqs=8, max_model_len=4096, block_size=16)
    for index in range(3):
        batch.add_request(index, range(1 + 256 * index, 257 + 256 * index), 20 * index)
    given = OnCuda(BackendConfig(**config, device="cuda", spec=spec))
    builder = MetadataBuilder(batch, given, max_num_batched_tokens=512, transport=transport, **settings)
    assert builder.transport == transport, builder.why_transport
    return batch, builder


def fields(metadata):
    return {name: getattr(metadata, name) for name in ("seq_lens", "positions", *ASKED)}


def captured(metadata, asks):
    """A graph that copies every field, which are asked for before it, or inside it behind ``record``."""
    if asks == "before":
        fields(metadata)
    graph, out = torch.cuda.CUDAGraph(), {}
    torch.cuda.synchronize()
    gc.disable()
    with torch.cuda.graph(graph):
        metadata.record()
        for name, value in fields(metadata).items():
            out[name] = value + 0
    gc.enable()
    return graph, out


@pytest.mark.parametrize("asks", ["before", "inside"])
@pytest.mark.parametrize("all_first", [True, False])
@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_a_graph_has_what_it_was_captured_with(transport, all_first, asks):
    _, builder = builder_of(transport)
    sizes = (8, 4)
    if all_first:
        metadata_of = {size: builder.capture(size) for size in sizes}
        graphs = {size: captured(metadata_of[size], asks) for size in sizes}
    else:
        graphs = {size: captured(builder.capture(size), asks) for size in sizes}
    for step in range(60):
        size = sizes[step % 2]
        metadata = builder.build(bucket=size)
        torch.cuda._sleep(200_000)
        graph, out = graphs[size]
        metadata.replay(graph)
        assert {name: value.tolist() for name, value in out.items()} == {
            name: getattr(metadata.host, name).tolist() for name in out
        }
        if step % 7 == 0:
            eager = builder.build({0: 40})
            for name, value in fields(eager).items():
                assert value.tolist() == getattr(eager.host, name).tolist(), name


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_steps_that_run_late_have_their_own(transport, depth):
    """The device is behind; no arena is written to before what was asked for has been read, too."""
    _, builder = builder_of(transport, depth=depth)
    first = builder.build()
    assert {name: value.tolist() for name, value in fields(first).items()} == {
        name: getattr(first.host, name).tolist() for name in fields(first)
    }
    wanted, got = [], []
    for step in range(120):
        metadata = builder.build({step % 3: 5})
        wanted.append({name: getattr(metadata.host, name).tolist() for name in ASKED})
        got.append({name: getattr(metadata, name) + 0 for name in ASKED})
        torch.cuda._sleep(300_000)
    assert [{name: value.tolist() for name, value in one.items()} for one in got] == wanted


def test_with_a_ticket_they_are_there_before_the_engines_replay():
    _, builder = builder_of("graph", ticket=True)
    graph, out = captured(builder.capture(4), "inside")
    for _ in range(40):
        metadata = builder.build(bucket=4)
        graph.replay()
        assert out["context_lens"].tolist() == metadata.host.context_lens.tolist()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("transport", ["graph", "copy"])
def test_only_the_first_ask_waits(transport):
    _, builder = builder_of(transport)
    fields(builder.build())
    builder.build()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            fields(builder.build())
    finally:
        torch.cuda.set_sync_debug_mode("default")
