"""Slots of states on a device of its own: sent with every step, at fixed addresses, and unmoved by steps ahead."""

import numpy as np
import pytest
from builder.device.test_sent_fields import backend

from attncore.builder import (
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    StateGroup,
    slice_by_tokens,
    slice_metadata,
)
from attncore.errors import CaptureError


class Seen:
    """In place of a captured graph: what the layers of a group of states see at each replay."""

    def __init__(self, metadata):
        self.states, self.metadata, self.seen = metadata.states["mamba"], metadata, []

    def replay(self):
        self.metadata.record()
        self.metadata.forget_step()
        self.seen.append((self.states.state_slot.tolist(), self.states.has_initial_state.tolist()))


def two_with_states(kernels):
    groups = [KVCacheGroup("full", 4), StateGroup("mamba", 9)]
    batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=groups, kernels=kernels)
    builder = MetadataBuilder(batch, backend(), max_num_batched_tokens=32, transport="copy")
    batch.add_request("a", {"full": [1, 2], "mamba": [5]}, 3)
    batch.add_request("b", {"full": [3, 4], "mamba": [2]})
    return batch, builder


def test_what_states_need_is_sent_with_every_step(kernels):
    batch, builder = two_with_states(kernels)
    assert not {"context_lens", "query_start_loc", "mamba.state_slot"} & builder._assembly.ring.unsent
    states = builder.build({"b": 4}).states["mamba"]
    assert (states.state_slot.tolist(), states.has_initial_state.tolist()) == ([5, 2], [True, False])
    assert states.query_start_loc.tolist() == [0, 1, 5]
    assert states.host.state_slot.tolist() == [5, 2]
    assert isinstance(states.host.state_slot, np.ndarray)
    batch.remove_request("a")
    assert builder.build({"b": 2}).states["mamba"].state_slot.tolist() == [2]


def test_a_captured_size_has_them_where_its_graph_reads(kernels):
    batch, builder = two_with_states(kernels)
    captured = builder.capture(4).states["mamba"].state_slot
    states = builder.build(bucket=4).states["mamba"]
    assert states.state_slot.data_ptr() == captured.data_ptr()
    assert (captured.tolist(), states.has_initial_state.tolist()) == ([5, 2, 0, 0], [True, False, False, False])
    batch.remove_request("a")
    builder.build(bucket=4)
    assert captured.tolist() == [2, 0, 0, 0]


def test_steps_ahead_keep_their_slots(kernels):
    """A request that began with its first token has a state in the steps behind it."""
    _, builder = two_with_states(kernels)
    graph = Seen(builder.capture(4))
    steps = builder.run_ahead(3, bucket=4)
    while steps.left:
        steps.replay(graph)
    slots, first, later = [5, 2, 0, 0], [True, False, False, False], [True, True, False, False]
    assert graph.seen == [(slots, first), (slots, later), (slots, later)]
    for step, seen in zip(steps, graph.seen, strict=True):
        states = step.states["mamba"]
        for found in (states, states.host):
            assert (found.state_slot.tolist(), found.has_initial_state.tolist()) == seen


def test_parts_of_a_step_have_theirs(kernels):
    """Prefills by themselves, and slices, one of which goes on in the middle of a prompt."""
    batch, builder = two_with_states(kernels)
    batch.add_request("c", {"full": [5, 6], "mamba": [7]})
    metadata = builder.build({"b": 4, "c": 3})
    cuts = slice_by_tokens(metadata.host.query_lens, 4)
    slices = [slice_metadata(metadata, cut, block_size=4) for cut in cuts]
    parts = [metadata.decode_metadata, metadata.prefill_metadata, *slices]
    wanted = [
        ([5], [True], [0, 1]), ([2, 7], [False, False], [0, 4, 7]),
        ([5, 2], [True, False], [0, 1, 2]), ([2], [True], [0, 2]), ([2, 7], [True, False], [0, 1, 2]),
        ([7], [True], [0, 2]),
    ]  # fmt: skip
    for part, expected in zip(parts, wanted, strict=True):
        states = part.states["mamba"]
        for found in (states, states.host):
            fields = found.state_slot, found.has_initial_state, found.query_start_loc
            assert tuple(field.tolist() for field in fields) == expected
        assert isinstance(states.host.state_slot, np.ndarray) != isinstance(states.state_slot, np.ndarray)


def test_a_slot_that_moves_ends_steps_ahead(kernels):
    """The device has the slot of before for those that are left."""
    batch, builder = two_with_states(kernels)
    graph = Seen(builder.capture(4))
    steps = builder.run_ahead(3, bucket=4)
    steps.replay(graph)
    batch.replace_block("a", 0, 7, "mamba")
    with pytest.raises(CaptureError, match="requests have left or blocks have moved"):
        steps.replay(graph)
    assert len(graph.seen) == steps.stop() == 1
    assert builder.build(bucket=4).states["mamba"].state_slot.tolist() == [7, 2, 0, 0]


def test_verdicts_on_drafts_are_refused(kernels):
    import torch

    batch, _ = two_with_states(kernels)
    with pytest.raises(ValueError, match="num_rejected given for drafts, but group 'mamba' holds states"):
        MetadataBuilder(batch, backend(), max_num_batched_tokens=32, num_rejected=torch.zeros(4, dtype=torch.int32))
