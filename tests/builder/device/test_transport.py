"""Which transport a builder takes on which device, and the advice of what it refuses."""

import dataclasses

import pytest
from builder.device.arena_batches import CONFIG, Backend, two_requests

from attncore.builder import InputBatch, MetadataBuilder


def builder_on(device, transport):
    backend = Backend(dataclasses.replace(CONFIG, device=device))
    return MetadataBuilder(two_requests(None), backend, max_num_batched_tokens=32, transport=transport)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_on_a_cpu_steps_are_read_where_they_are_built(device):
    assert builder_on(device, "auto").transport == "none"
    assert builder_on(device, "copy").transport == "copy"


def test_a_device_without_cuda_graphs_gets_copies():
    made = builder_on("meta", "auto")
    assert (made.transport, made.why_transport) == ("copy", "meta has no CUDA graphs")
    made.build()
    assert made.build({"a": 3}).seq_lens.device.type == "meta"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_graph_is_refused_where_there_are_no_cuda_graphs(device):
    with pytest.raises(ValueError, match=f"transport: graph, but {device} has no CUDA graphs; leave it at auto"):
        builder_on(device, "graph")


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match="transport: 'bus' is not one of auto, graph, copy"):
        builder_on("cpu", "bus")


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("bucket", [None, 4])
def test_a_step_whose_place_on_the_device_was_taken_is_no_last_step(bucket, monkeypatch):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    builder.capture(4)
    batch.add_request("a", [1, 2, 3], 5)
    last = builder.build(bucket=bucket).step

    def interrupted(arena):
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(builder._assembly.side, "_record", interrupted)  # behind the copy
        with pytest.raises(Interrupt):
            builder.build(bucket=bucket)
    assert (builder.last_step, batch.num_computed_tokens("a")) == (last, 6)
    assert builder.last_metadata is None
    metadata = builder.build(bucket=bucket)
    assert builder.last_metadata is metadata
    assert metadata.seq_lens[0] == metadata.host.seq_lens[0] == 7


def test_a_step_that_is_refused_before_it_is_sent_leaves_the_last_one(monkeypatch):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    batch.add_request("a", [1, 2], 5)
    metadata = builder.build()
    with pytest.raises(ValueError, match="block"):
        builder.build(query_len=4)
    assert builder.last_metadata is metadata
