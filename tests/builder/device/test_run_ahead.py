"""Steps ahead are the steps that would be built one by one, on the device and as they are asked for on the host."""

import pytest
from builder.device.ahead_engine import GROUPS, AheadEngine

from attncore import InputBatch, MetadataBuilder
from attncore.graphs import capturing, launch, new_graph


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_ahead_are_those_that_would_be_built(kernels, groups, depth):
    engine = AheadEngine(depth, groups=groups, kernels=kernels, depth=depth, transport="copy")
    while engine.steps < 120:
        engine.turn()


def test_a_stand_in_for_a_graph_advances_between_its_steps(kernels):
    """It repeats what is launched in the capture alone, and runs Python again, which asks for each step's pages."""
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    metadata, graph, seen = builder.capture(2), new_graph("cpu"), []

    def model():
        seen.append((metadata.positions.tolist(), metadata.paged_kv_indices.tolist()))

    with capturing(graph):
        metadata.record()
        launch(model)
        metadata.record_next()
        launch(model)
    batch.add_request("a", [5, 6, 7], 3)
    steps = builder.run_ahead(4, bucket=2)
    del seen[:]
    steps.replay(graph, 2)
    steps.replay(graph, 2)
    assert seen == [([3, 0], [5]), ([4, 0], [5, 6]), ([5, 0], [5, 6]), ([6, 0], [5, 6])]
