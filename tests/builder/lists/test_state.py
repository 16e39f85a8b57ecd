"""CommonAttentionState: stand-ins for graphs replay steps over its buffers correctly; what is captured and staged."""

import numpy as np
import oracles
import pytest
import torch
from builder.lists.captured_state import decodes, made
from graph_engine import GraphEngine, expected_buffers

from attncore import BackendConfig
from attncore.builder import CommonMetadataBuilder, metadata_from_fields
from attncore.builder.device.memory import aligned_bytes
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.builder.lists.graph_buffers import GraphBuffers, _Arena
from attncore.builder.slices import own_arrays
from attncore.graphs import StandInGraph, capturing, launch
from attncore.reference import ReferenceBackend

CASES = [
    {"layout": layout, "window": window} for layout in ("common", "flash", "flashinfer", "rocm") for window in (None, 6)
] + [{"layout": layout, "encoder": True} for layout in ("common", "flash", "rocm")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_replayed_steps_are_right(kernels, case):
    """Rows that grow, shrink, come and go; sizes in any order; blocks that were another's before."""
    engine = GraphEngine(5, kernels=kernels, **case)
    engine.capture()
    for step in range(24):
        engine.step(in_place=step % 3 == 0)
    engine.check_cache()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_replayed_steps_that_were_advanced(kernels, case):
    engine = GraphEngine(6, kernels=kernels, block_size=3, **case)
    engine.capture()
    for step in range(5):
        engine.advanced_steps(5)
        engine.step(in_place=step % 2 == 0)
    engine.check_cache()


class Plain:
    """What expected_buffers asks of an engine."""

    def __init__(self, layout, window=None, block_size=4, longest=30, sizes=(1, 2, 5)):
        self.layout, self.window, self.block_size, self.longest = layout, window, block_size, longest
        self.sizes, self.encoder = sizes, False


@pytest.mark.parametrize("layout", ["common", "flash", "flashinfer", "rocm"])
@pytest.mark.parametrize("window", [None, 7])
def test_numpy_arrays_without_a_backend(kernels, layout, window):
    one = Plain(layout, window)
    builder = CommonMetadataBuilder(
        4, layout, sliding_window=window, max_seq_len_to_capture=one.longest, kernels=kernels
    )
    state, read = CommonAttentionState(None, builder), {}
    with state.graph_capture(5):
        for size in one.sizes:
            metadata, graph = state.metadata_for_capture(size), StandInGraph()
            names = list(state.graph_input_buffers(metadata))
            with capturing(graph):
                copies = launch(lambda fields: tuple(map(np.copy, fields)), [getattr(metadata, name) for name in names])
            read[size] = graph, dict(zip(names, copies, strict=True))
    rng = np.random.default_rng(3)
    for step in range(60):
        rows = []
        for _ in range(rng.integers(1, 6)):
            context = int(rng.integers(0, 30))
            rows.append((context, rng.integers(0, 999, oracles.cdiv(context + 1, 4)).tolist(), None))
        groups, pad = decodes([row[:2] for row in rows]), state.pad_size(len(rows))
        if step % 2:
            metadata = state.build(groups, pad)
        else:
            metadata = builder.build(groups, pad)
            state.prepare(metadata)
        graph, found = read[metadata.num_reqs]
        graph.replay()
        assert {name: array.tolist() for name, array in found.items()} == expected_buffers(rows, one, metadata.num_reqs)


@pytest.mark.parametrize("window", [None, 5])
def test_the_reference_backend_over_the_buffers(kernels, window):
    """Replayed, and eagerly over a build without padding: the same output and the same cache."""
    backend = ReferenceBackend(BackendConfig(4, 2, 8, "float32", 4))
    impl = backend.impl("layer", scale=0.3, sliding_window=window)
    builder = CommonMetadataBuilder(
        4, sliding_window=window, max_seq_len_to_capture=32, backend=backend, kernels=kernels
    )
    state = CommonAttentionState(backend, builder)
    caches = [backend.allocate_kv_cache(32).normal_() for _ in range(2)]
    caches[1].copy_(caches[0])
    given, graphs = [torch.zeros(4, heads, 8) for heads in (4, 2, 2)], {}
    with state.graph_capture(4):
        for size in (4, 2):
            metadata, graph = state.metadata_for_capture(size), StandInGraph()
            with capturing(graph):
                graphs[size] = graph, launch(impl.forward, *(one[:size] for one in given), caches[0], metadata)
    caches[0].copy_(caches[1])  # the capture ran, once
    rng, numbers = np.random.default_rng(1), torch.Generator().manual_seed(1)
    for _ in range(30):
        ids, rows = rng.permutation(32).tolist(), []
        for _ in range(rng.integers(1, 5)):
            context = int(rng.integers(0, 32))
            rows.append((context, [ids.pop() for _ in range(oracles.cdiv(context + 1, 4))]))
        n, groups = len(rows), decodes(rows)
        fresh = [torch.randn(n, *one.shape[1:], generator=numbers) for one in given]
        for held, new in zip(given, fresh, strict=True):
            held[:n] = new
        metadata = builder.build(groups, state.pad_size(n))
        state.prepare(metadata)
        graph, output = graphs[metadata.num_reqs]
        graph.replay()
        expected = impl.forward(*fresh, caches[1], builder.build(groups))
        torch.testing.assert_close(output[:n], expected)
        torch.testing.assert_close(*caches)


# ---- what is captured


def test_metadata_to_capture_over(kernels):
    _, state = made("flashinfer", kernels=kernels)
    with state.graph_capture(4):
        metadata = state.metadata_for_capture(2)
    expected = {
        "slot_mapping": [-1, -1], "positions": [0, 0], "token_to_req_indices": [0, 1], "seq_lens": [1, 1],
        "seq_start_loc": [0, 1, 2], "context_lens": [0, 0], "query_lens": [0, 0], "logits_indices": [0, 0],
        "query_start_loc": [0, 0, 0], "block_table": [[0] * 4] * 2, "paged_kv_indptr": [0, 0, 0],
        "paged_kv_last_page_len": [0, 0], "paged_kv_indices": [0] * 16,
    }  # fmt: skip
    assert {name: getattr(metadata, name).tolist() for name in expected} == expected
    assert {name: getattr(metadata.host, name).tolist() for name in expected} == expected
    assert metadata.slot_mapping.dtype == np.int64
    assert metadata.block_table.dtype == np.int32
    found = metadata.max_query_len, metadata.max_seq_len, metadata.max_decode_seq_len, metadata.max_prefill_seq_len
    assert found == (1, 16, 16, 0)
    found = metadata.num_reqs, metadata.num_tokens, metadata.num_decodes, metadata.num_decode_tokens
    assert found == (2, 2, 2, 2)
    assert metadata.use_cuda_graph
    assert metadata.decode_metadata is metadata
    assert metadata.prefill_metadata is None
    with pytest.raises(ValueError, match="metadata: not as CommonMetadataBuilder"):
        metadata.advance_step()
    assert state.captured == (1, 2, 4)
    assert [state.pad_size(n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 0, -1]


def test_encoders_to_capture_over():
    _, state = made(encoder_decoder=True, max_encoder_seq_len_to_capture=9)
    with state.graph_capture(4):
        metadata = state.metadata_for_capture(2)
    assert metadata.encoder_seq_lens.tolist() == [1, 1]
    assert metadata.encoder_seq_start_loc.tolist() == [0, 1, 2]
    assert metadata.cross_block_table.tolist() == [[0, 0, 0]] * 2
    assert len(metadata.cross_slot_mapping) == 0
    assert metadata.max_encoder_seq_len == 9


def test_sizes_are_views_of_the_largest():
    _, state = made()
    with state.graph_capture(4):
        small, large = state.metadata_for_capture(2), state.metadata_for_capture(4)
    for name in state.graph_input_buffers(large):
        assert getattr(small, name).ctypes.data == getattr(large, name).ctypes.data, name
        assert getattr(small, name).flags.c_contiguous


def test_a_size_captured_again_is_the_same_and_padding_again():
    builder, state = made()
    held = state.prepare(builder.build(decodes([(5, [3, 4])]), 1))
    assert held.slot_mapping.tolist() == [17, -1]
    with state.graph_capture(4):
        again = state.metadata_for_capture(2)
    assert again is held
    assert again.slot_mapping.tolist() == [-1, -1]
    assert again.block_table.tolist() == [[0] * 4] * 2


def test_metadata_that_was_broadcast_is_prepared():
    builder, state = made("flashinfer")
    metadata = builder.build(decodes([(5, [3, 4])]), 1)
    state.prepare(metadata_from_fields(metadata.asdict_zerocopy()))
    assert state.graph_input_buffers(metadata)["slot_mapping"].tolist() == [17, -1]


def test_a_backends_tensors():
    backend = ReferenceBackend(BackendConfig(2, 2, 8, "float32", 4))
    builder, state = made(backend=backend)
    metadata = builder.build(decodes([(5, [3, 4])]), 1)
    buffers = state.graph_input_buffers(metadata)
    assert all(isinstance(one, torch.Tensor) for one in buffers.values())
    state.prepare(metadata)
    assert buffers["slot_mapping"].tolist() == [17, -1]
    assert buffers["slot_mapping"].dtype == torch.int64


# ---- the way to a device, on a CPU


class Event:
    """A copy that is still under way when it is asked about, and over once it was waited for."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


class Staged(GraphBuffers):
    """Two staging blocks before one 'device' block, all in host memory; copies arrive when ``arrive`` is called."""

    def _allocate(self, device):
        self._device, self.sent, self.events = torch.zeros(self.nbytes, dtype=torch.uint8), [], {}
        arenas = []
        for index in range(2):
            arenas.append(_Arena(aligned_bytes(self.nbytes), index))
            arenas[-1].tensor = torch.from_numpy(arenas[-1].memory)
            rows = self._arrays(arenas[-1], self.max_batch_size)["token_to_req_indices"]
            rows[:] = np.arange(self.max_batch_size)
        return arenas

    def _record(self, arena):
        self.events.setdefault(arena.index, Event())
        self.sent.append(arena)

    def _wait_for(self, arena):
        if arena.index in self.events:
            self.events[arena.index].synchronize()


def test_staging_blocks_take_turns_and_are_waited_for():
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16)
    buffers, one = Staged(builder, "cpu", 4), Plain("flashinfer", longest=16, sizes=(4,))
    views, rng = buffers.views(4), np.random.default_rng(2)
    for step in range(12):
        rows = []
        for _ in range(rng.integers(1, 5)):
            context = int(rng.integers(0, 16))
            rows.append((context, rng.integers(0, 99, oracles.cdiv(context + 1, 4)).tolist(), None))
        metadata = builder.build(decodes([row[:2] for row in rows]), 4 - len(rows))
        step_arrays = own_arrays(metadata.host)
        host = buffers.write(step_arrays, 4, buffers.copies(step_arrays, 4))
        expected = expected_buffers(rows, one, 4)
        assert {name: views[name].tolist() for name in buffers.names} == expected
        assert {name: getattr(host, name).tolist() for name in buffers.names} == expected
        assert buffers.sent[-1] is buffers._arenas[step % 2]
        assert sum(event.waited for event in buffers.events.values()) == max(0, step - 1)
