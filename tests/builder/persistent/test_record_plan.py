"""Plans that a captured graph makes by itself: ``record_plan`` of a backend, and which steps the host plans."""

import pytest
from builder.persistent.capture_builders import new_builder, spec
from builder.plain_backend import BLOCK, Plain, config

from attncore import graphs
from attncore.builder import KVCacheGroup


class Planning(Plain):
    """Notes what it is asked to plan; ``records`` says whether its graphs plan by themselves."""

    def __init__(self, config, *, records=True):
        super().__init__(config)
        self.records, self.planned, self.recorded = records, [], []

    def plan(self, metadata):
        self.planned.append((metadata.step, metadata.num_reqs))

    def record_plan(self, metadata):
        self.recorded.append((metadata.num_reqs, graphs.is_capturing("cpu"), metadata.paged_kv_indptr.tolist()))
        return self.records


def made(kernels, *, records=True):
    backend = Planning(config(spec("always")), records=records)
    batch, builder = new_builder(kernels, backend=backend)
    batch.add_request("a", [1, 2, 3], 4)
    return backend, batch, builder


def capture(builder, num_reqs, *, records=True):
    metadata, graph = builder.capture(num_reqs), graphs.new_graph("cpu")
    with graphs.capturing(graph):
        if records:
            metadata.record()
    return graph


def test_steps_of_a_size_whose_graph_plans_are_not_planned_on_the_host(kernels):
    backend, _, builder = made(kernels)
    capture(builder, 2)
    assert backend.planned == [(0, 2)], "the capture's own step is planned"
    assert backend.recorded == [(2, True, [0, 0, 0])]
    backend.planned.clear()
    for _ in range(3):
        builder.build(bucket=2)
    assert not backend.planned
    builder.build()
    assert backend.planned == [(4, 1)], "an eager one is planned as before"
    builder.build_empty(2)
    assert backend.planned == [(4, 1)]


def test_a_size_whose_graph_does_not_plan_is_planned_for_each_replay(kernels):
    backend, _, builder = made(kernels, records=False)
    capture(builder, 2)
    builder.build(bucket=2)
    assert backend.planned == [(0, 2), (1, 2)]


def test_other_sizes_are_planned(kernels):
    backend, _, builder = made(kernels)
    capture(builder, 2)
    capture(builder, 4, records=False)
    backend.planned.clear()
    builder.build(bucket=4)
    builder.build(bucket=2)
    assert backend.planned == [(2, 4)]


def test_a_size_that_is_captured_anew_is_planned_until_its_graph_plans(kernels):
    backend, _, builder = made(kernels)
    capture(builder, 2)
    capture(builder, 2, records=False)
    backend.planned.clear()
    builder.build(bucket=2)
    assert backend.planned == [(2, 2)]
    capture(builder, 2)
    builder.release(2)
    capture(builder, 2, records=False)
    backend.planned.clear()
    builder.build(bucket=2)
    assert [num_reqs for _, num_reqs in backend.planned] == [2]


def test_of_several_groups_those_alone_are_planned_whose_nodes_do_not(kernels):
    backends = {name: Planning(config(spec("always")), records=name == "full") for name in ("full", "local")}
    groups = [KVCacheGroup("full", BLOCK), KVCacheGroup("local", BLOCK, sliding_window=8)]
    batch, builder = new_builder(kernels, backend=backends, groups=groups)
    batch.add_request("a", {"full": [1, 2], "local": [3, 4]}, 4)
    capture(builder, 2)
    builder.build(bucket=2)
    assert [len(backend.planned) for backend in backends.values()] == [1, 2]


def test_a_backend_without_the_method_is_planned(kernels):
    class Old(Plain):
        steps = ()

        def plan(self, metadata):
            self.steps = (*self.steps, metadata.step)

    backend = Old(config(spec("always")))
    batch, builder = new_builder(kernels, backend=backend)
    batch.add_request("a", [1, 2], 4)
    capture(builder, 2)
    builder.build(bucket=2)
    assert backend.steps == (0, 1)


def test_a_record_that_fails_leaves_the_plan_to_the_host(kernels, monkeypatch):
    backend, _, builder = made(kernels)

    def refused(metadata):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(backend, "record_plan", refused)
    with pytest.raises(RuntimeError, match="no kernel"):
        capture(builder, 2)
    builder.build(bucket=2)
    assert backend.planned == [(0, 2), (1, 2)]
