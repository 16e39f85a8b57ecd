"""Fields that follow from others (``paged_kv_num_pages``) are those of the step that runs: computed at each access of a
captured size, whose graph must compute them again although a warm-up has read them before.
"""

import torch
from builder.adopted.test_adopted_captures import PersistentBuffers, steps_of
from builder.plain_backend import Least, config

from attncore.builder import InputBatch, KVCacheGroup, MetadataBuilder
from attncore.graphs import capturing, new_graph

PAGES = [KVCacheGroup("one", 2), KVCacheGroup("other", 3)]


def is_computed_anew(metadata):
    """Whether a capture after this access has an operation of its own, which computes the field."""
    warm_up, inside = metadata.paged_kv_num_pages, metadata.paged_kv_num_pages
    return warm_up.data_ptr() != inside.data_ptr()


def sending(kernels, groups=PAGES):
    batch = InputBatch(max_num_reqs=4, max_model_len=24, groups=groups, kernels=kernels)
    backends = {group.name: Least(config(block_size=group.block_size)) for group in groups}
    return batch, MetadataBuilder(batch, backends, max_num_batched_tokens=32, transport="copy")


def test_steps_ahead_have_their_own_pages(kernels):
    batch, builder = sending(kernels)
    metadata, graph = builder.capture(2), new_graph("cpu")
    with capturing(graph):
        metadata.record()
    batch.add_request("a", {"one": [1, 2, 3, 4], "other": [1, 2, 3]}, num_computed_tokens=2)
    steps = builder.run_ahead(5, bucket=2)
    for index in range(5):
        steps.replay(graph)
        for name, group in steps.first.groups.items():
            expected = steps[index].groups[name].paged_kv_num_pages.tolist()
            assert group.paged_kv_num_pages.tolist() == expected, (index, name)


def test_a_captured_size_of_the_persistent_builder(kernels):
    _, builder = sending(kernels)
    assert all(is_computed_anew(group) for group in builder.capture(2).groups.values())


def test_a_step_without_a_graph_computes_it_once(kernels):
    batch, builder = sending(kernels)
    batch.add_request("a", {"one": [1, 2, 3, 4], "other": [1, 2, 3]}, num_computed_tokens=2)
    assert not is_computed_anew(builder.build())


def test_a_captured_size_of_adopted_steps():
    steps, buffers = steps_of(), PersistentBuffers()
    metadata = steps.build(**buffers.fill([5, 9], 4), capturing=True)
    assert isinstance(metadata.paged_kv_num_pages, torch.Tensor)
    assert is_computed_anew(metadata)
