"""What an engine does between a step and its next one, over nodes that the host runs and over copies."""

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from attncore import InputBatch, MetadataBuilder
from attncore.errors import AttncoreError, CaptureError
from attncore.kernels import load_kernels

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")

pytestmark = pytest.mark.skipif(load_kernels().IMPLEMENTATION != "cython", reason="numba's kernels serve no device")

BLOCK = 4


@pytest.fixture(params=["graph", "copy"])
def served(request, monkeypatch):
    """A batch, a builder, and a graph of each captured size: nothing but the nodes that fetch a step."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "benchmarks"), *sys.path])
    from gpu_work import Backend, CalledAgain
    from nodes_on_host import nodes_on_host

    batch = InputBatch(max_num_reqs=8, max_model_len=64, block_size=BLOCK)
    backend = Backend("cpu", BLOCK, needs=("paged_kv_indptr", "paged_kv_last_page_len"))
    options = {"max_num_batched_tokens": 64, "transport": request.param}
    with nodes_on_host(lambda call, name: call) if request.param == "graph" else nullcontext():
        builder = MetadataBuilder(batch, backend, **options)

        def graph(size):
            metadata = builder.capture(size)
            metadata.record()
            return CalledAgain(metadata.record)

        yield batch, builder, graph


def test_what_a_step_sampled_goes_to_no_request_that_came_since(served):
    """A step that moves rows, and a request that leaves behind it, are two changes."""
    batch, builder, _ = served
    column = batch.token_column("tokens")
    batch.add_request("prompt", [1, 2, 3])
    column.give("prompt", list(range(12)))
    batch.add_request("decode", [4, 5], 3)
    metadata = builder.build({"prompt": 5})
    assert metadata.moves
    batch.remove_request("decode")
    batch.add_request("new", [6, 7])
    column.write(metadata, [111, 222])
    assert (column["new"], column["prompt"]) == (0, 222)
    with pytest.raises(AttncoreError, match="blocks have moved or left"):
        metadata.host.paged_kv_indices  # noqa: B018


def test_a_build_that_fails_behind_moves_leaves_older_steps_readable(served):
    batch, builder, _ = served
    batch.add_request("a", [1, 2, 3], 2)
    batch.add_request("b", [4, 5, 6], 3)
    fails = []
    builder.register_field("mine", np.int32, "request", lambda step, out: fails and fails[0]())
    metadata = builder.build()
    fails.append(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        builder.build({"a": 2})
    assert metadata.host.paged_kv_indices.tolist() == [1, 4]


def test_columns_are_of_the_byte_order_of_this_machine(served):
    batch, builder, _ = served
    column = batch.column("value", np.dtype(np.int32).newbyteorder())
    builder.register_column(column)
    for name in "ab":
        batch.add_request(name, [ord(name), ord(name) + 2])
    metadata = builder.build()
    column.write(metadata, [1, 2])
    assert (column["a"], column.dtype) == (1, np.int32)
    column.write(metadata, np.array([3, 4], np.dtype(np.int32).newbyteorder()))
    assert builder.build().value.tolist() == [3, 4]


def test_a_size_whose_step_waits_is_not_released(served):
    batch, builder, graph = served
    batch.add_request("a", [1, 2, 3, 4], 3)
    replayed = graph(2)
    metadata = builder.build(bucket=2)
    if builder.transport == "graph":
        with pytest.raises(CaptureError, match=r"^release: step 1 of 2 requests waits for a replay"):
            builder.release(2)
    metadata.replay(replayed)
    steps = builder.run_ahead(3, bucket=2)
    with pytest.raises(CaptureError, match=r"^release: step 2 of 2 requests waits for a replay"):
        builder.release(2)
    steps.replay(replayed)
    assert steps.stop() == 1
    builder.release(2)
    assert builder.captured == ()


def test_the_pages_of_the_step_that_runs_are_read(served):
    """Across the border of a block, and first read behind it."""
    batch, builder, graph = served
    batch.add_request("a", [1, 2, 3, 4], 3)
    batch.add_request("b", [5, 6, 7, 8], 6)
    replayed = graph(2)
    steps = builder.run_ahead(4, bucket=2)
    for step in range(4):
        steps.replay(replayed)
        if step != 1:
            assert steps.first.paged_kv_indptr.tolist() == steps[step].paged_kv_indptr.tolist()
            assert steps.first.paged_kv_indices.tolist() == steps[step].paged_kv_indices.tolist()


def test_a_refused_capture_keeps_what_the_graph_plans(served):
    batch, builder, graph = served
    batch.add_request("a", [1, 2, 3, 4], 3)
    graph(1)
    shape = builder._assembly.shapes.find(1)
    shape.plans = ()
    builder.run_ahead(2, bucket=1)
    with pytest.raises(CaptureError, match="steps ahead not replayed yet"):
        builder.capture(1)
    assert shape.plans == ()
