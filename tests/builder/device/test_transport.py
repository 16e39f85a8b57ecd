"""Which transport a builder takes on which device, and the advice of what it refuses."""

import dataclasses

import pytest
from builder.device.arena_batches import CONFIG, Backend, two_requests

from attncore.builder import MetadataBuilder


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
