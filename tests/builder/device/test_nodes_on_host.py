"""The state machine of batches over the transport ``graph``, whose nodes the host runs: without a GPU, all but them."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from batches import Batches
from builder.plain_backend import Least
from hypothesis import HealthCheck, settings

from attncore import ATTNCORE_API, BackendConfig, BackendSpec, MultipleOf
from attncore.kernels import load_kernels

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the transport with nodes needs triton's module")

pytestmark = pytest.mark.skipif(load_kernels().IMPLEMENTATION != "cython", reason="numba's kernels serve no device")

SPEC = BackendSpec(
    name="least", api=ATTNCORE_API, factory="nowhere:Least", devices={"cpu": 1}, dtypes={"float32"}, head_sizes={8},
    block_sizes=MultipleOf(1), device_needs={"paged_kv_indices"}, cuda_graph="always",
)  # fmt: skip


class BatchesByNodes(Batches):
    transports = ("graph", "graph")

    def teardown(self):
        super().teardown()
        if hasattr(self, "nodes"):
            self.nodes.close()

    def captured_now(self, size, metadata):
        metadata.record()

    def run(self, size, metadata):
        metadata.replay(_Again(metadata))
        assert metadata.positions.tolist() == metadata.host.positions.tolist()

    def backend(self):  # asked for right before the builder is made
        self.nodes = ExitStack()
        self.nodes.enter_context(_nodes_on_host()(lambda call, name: call))
        world = self.ranks.world_size if self.ranks else 1
        found = {}
        for group in self.groups:
            fields = {"num_heads": 1, "num_kv_heads": 1, "head_size": 8, "dtype": "float32", "device": "cpu"}
            block_size = group.tokens_per_column // world
            found[group.name] = Least(BackendConfig(block_size=block_size, spec=SPEC if world == 1 else None, **fields))
        return found


class _Again:
    """A graph that was captured over a step's nodes alone."""

    def __init__(self, metadata):
        self.replay = metadata.record


def _nodes_on_host():
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        from nodes_on_host import nodes_on_host
    finally:
        del sys.path[0]
    return nodes_on_host


TestBatchesByNodes = BatchesByNodes.TestCase
TestBatchesByNodes.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
