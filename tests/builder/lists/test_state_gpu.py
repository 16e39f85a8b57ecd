"""CommonAttentionState with CUDA graphs: the steps of test_state.py, and faults that only a device shows."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from graph_engine import GraphEngine

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, Sequence, SequenceGroup
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.errors import CaptureError
from attncore.graphs import StandInGraph, capturing, is_capturing, launch, new_graph
from attncore.reference import ReferenceBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

CASES = [
    {"layout": layout, "window": window} for layout in ("common", "flash", "flashinfer", "rocm") for window in (None, 6)
] + [{"layout": layout, "encoder": True} for layout in ("common", "flash", "rocm")]


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_replayed_steps_are_right(case):
    engine = GraphEngine(5, device="cuda", **case)
    engine.capture()
    for step in range(60):
        engine.step(in_place=step % 3 == 0)
    for _ in range(6):
        engine.advanced_steps(5)
    engine.check_cache()


def decodes(rows):
    return [SequenceGroup(False, [Sequence(i, 1, context, table)]) for i, (context, table) in enumerate(rows)]


class Planning(ReferenceBackend):
    planned = 0

    def plan(self, metadata):
        type(self).planned += 1


def made(kind=ReferenceBackend, sizes=(1, 4), layout="flashinfer", capture=64):
    """(builder, state, the metadata of each captured size)"""
    backend = kind(BackendConfig(2, 2, 8, "float32", 4, device="cuda"))
    builder = CommonMetadataBuilder(4, layout, max_seq_len_to_capture=capture, backend=backend)
    state = CommonAttentionState(backend, builder)
    with state.graph_capture(max(sizes)):
        return builder, state, {size: state.metadata_for_capture(size) for size in sizes}


def test_a_step_reaches_the_graph_without_waiting():
    builder, state, captured = made()
    graph = new_graph("cuda")
    with capturing(graph):
        read = launch(lambda: captured[4].slot_mapping + 0)
    metadata = builder.build(decodes([(5, [3, 4])] * 3), 1)
    with no_synchronisation():
        for _ in range(8):
            state.prepare(metadata)
            state.begin_forward(metadata)
            graph.replay()
        held = state.build(decodes([(6, [3, 4])] * 2), 2)
        state.begin_forward(held)
        graph.replay()
    assert read.tolist() == [18, 18, -1, -1]


@pytest.mark.parametrize("in_place", [False, True])
def test_no_step_overtakes_the_copy_of_another(in_place):
    """The stream is held up while the host runs ahead; what each step's place in the stream reads is that step's."""
    builder, state, captured = made(capture=4096, sizes=(1, 64))
    rng, seen, expected = np.random.default_rng(4), [], []
    torch.cuda.synchronize()
    for _ in range(40):
        rows = []
        for _ in range(int(rng.integers(1, 65))):
            context = int(rng.integers(0, 4096))
            rows.append((context, rng.integers(0, 9999, context // 4 + 1).tolist()))
        if len(rows) == 1:
            continue
        torch.cuda._sleep(20_000_000)  # about 10 ms
        if in_place:
            metadata = state.build(decodes(rows), 64 - len(rows))
        else:
            metadata = builder.build(decodes(rows), 64 - len(rows))
            state.prepare(metadata)
        seen.append(
            [getattr(captured[64], name).clone() for name in ("slot_mapping", "block_table", "paged_kv_indices")]
        )
        expected.append(builder.build(decodes(rows), 64 - len(rows)).host)
    for step, host in zip(seen, expected, strict=True):
        assert step[0].tolist() == host.slot_mapping.tolist()
        assert np.array_equal(step[1].cpu().numpy(), host.block_table)
        indices = step[2].cpu().numpy()
        assert np.array_equal(indices[: len(host.paged_kv_indices)], host.paged_kv_indices)
        assert not indices[len(host.paged_kv_indices) :].any()


def test_the_wrong_moment_on_a_real_stream():
    builder, state, captured = made(Planning)
    metadata = builder.build(decodes([(5, [3, 4])] * 3), 1)
    planned, messages = Planning.planned, []
    calls = (
        lambda: state.prepare(metadata),
        lambda: state.build(decodes([(5, [3, 4])]), 0),
        lambda: builder.build(decodes([(5, [3, 4])]), 0),
        lambda: state.metadata_for_capture(1),
        lambda: metadata.advance_step(),
        lambda: capturing(new_graph("cuda")).__enter__(),
    )
    with state.graph_capture(4):
        with capturing(torch.cuda.CUDAGraph()):
            assert is_capturing("cuda")
            captured[4].slot_mapping.clone()
            for call in calls:
                with pytest.raises(CaptureError) as caught:
                    call()
                messages.append(str(caught.value).partition(":")[0])
    assert messages == ["prepare", "plan", "plan", "metadata_for_capture", "advance_step", "capturing"]
    assert Planning.planned == planned
    assert not is_capturing("cuda")
    state.prepare(metadata)
    assert captured[4].slot_mapping.tolist() == [17, 17, 17, -1]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("layout", ["common", "flash", "flashinfer", "rocm"])
def test_advancing_on_the_device(layout, window):
    """Tensors keep their addresses and have the next step; nothing is waited for."""
    backend = ReferenceBackend(BackendConfig(2, 2, 8, "float32", 4, device="cuda"))
    builder = CommonMetadataBuilder(4, layout, sliding_window=window, backend=backend, max_seq_len_to_capture=64)
    rows = [(5, list(range(10, 17))), (12, list(range(40, 47))), (3, list(range(70, 77)))]
    metadata = builder.build(decodes(rows), 1)
    names = [name for name in (
        "slot_mapping", "positions", "seq_lens", "context_lens", "seq_start_loc", "block_table", "paged_kv_indptr",
        "paged_kv_last_page_len",
    ) if hasattr(metadata, name)]  # fmt: skip
    held = {name: getattr(metadata, name) for name in names}
    tokens, sampled = torch.full((4,), 9, device="cuda"), torch.tensor([[5], [6], [7]], device="cuda")
    for step in range(1, 14):
        torch.cuda._sleep(2_000_000)
        with no_synchronisation():
            metadata.advance_step(tokens, sampled)
        fresh = builder.build(decodes([(context + step, table) for context, table in rows]), 1).host
        for name, tensor in held.items():
            assert getattr(metadata, name) is tensor
            assert tensor.tolist() == getattr(fresh, name).tolist(), name
        assert tokens.tolist() == [5, 6, 7, 0]
        if layout == "flashinfer":
            assert metadata.paged_kv_indices.tolist() == fresh.paged_kv_indices.tolist()
            assert metadata.block_table_bound.tolist() == np.diff(fresh.paged_kv_indptr).tolist()


def test_a_stand_in_is_no_capture_of_the_device():
    with capturing(StandInGraph()):
        assert not is_capturing("cuda")
