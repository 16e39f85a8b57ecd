"""The life of a builder over its arenas: closing, release, a second builder, threads, and inference mode."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from builder.device.arena_batches import CONFIG, Backend, two_requests

from attncore.builder import InputBatch, MetadataBuilder
from attncore.builder.device.by_copy import CopyTransport
from attncore.builder.persistent import assembly
from attncore.errors import AttncoreError, CaptureError


@pytest.fixture
def batch(kernels):
    return two_requests(kernels)


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_a_closed_builder_builds_nothing(batch, transport):
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport=transport)
    made.capture(2)
    made.build()
    made.close()
    made.close()
    for call in (made.build, lambda: made.build(bucket=2), lambda: made.build({"a": 2}), lambda: made.build_empty(2)):
        with pytest.raises(AttncoreError, match="builder: closed"):
            call()
    assert batch.num_computed_tokens("a") == 4


def test_a_released_size_may_be_captured_again(batch):
    made = MetadataBuilder(batch, max_num_batched_tokens=32, decode_threshold=2)
    made.capture(2)
    made.release(2)
    with pytest.raises(CaptureError, match="bucket: 2 was not captured"):
        made.build(bucket=2)
    with pytest.raises(
        CaptureError, match=r"^num_reqs: 2 was not captured \(captured: none\); there is nothing to rel"
    ):
        made.release(2)
    assert made.capture(2, query_len=2).num_tokens == 4


def test_a_second_builder_starts_from_nothing(batch, monkeypatch):
    first = MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    assert first.build().block_table[0, :3].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="batch: another builder's tables on a device follow it"):
        MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    taken = []
    monkeypatch.setattr(assembly, "new_transport", taken.append)
    monkeypatch.setattr(assembly, "ArenaRing", taken.append)
    with pytest.raises(ValueError, match="batch: another builder's tables on a device follow it"):
        MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    assert not taken  # it is refused before any memory of a device is
    monkeypatch.undo()
    MetadataBuilder(batch, max_num_batched_tokens=32)  # on the CPU nothing follows
    first.close()
    assert MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy").build().block_table[1, :2].tolist() == [
        9,
        10,
    ]


@pytest.mark.parametrize("replayed", [None, 0, 1, 2])
def test_a_closed_builder_goes_with_its_last_reference(batch, replayed):
    """The batch holds steps ahead only while some may be left."""
    made = MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")
    made.capture(2)
    if replayed is not None:
        steps = made.run_ahead(2, bucket=2)
        for _ in range(replayed):
            steps.replay(SimpleNamespace(replay=lambda: None))
        del steps
    made.close()
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert batch.num_computed_tokens("a") == 3 + (replayed or 0)


def test_a_dropped_transport_frees_its_memory_at_once(batch):
    """Memory of a device is scarce: it does not wait for Python's collector."""
    side = MetadataBuilder(batch, max_num_batched_tokens=32, transport="copy")._assembly.side
    tables = list(batch._core.tables.values())
    gc.disable()
    try:
        other = CopyTransport("cpu", tables)
        other.attach(side._ring)
        memory = [weakref.ref(tensor) for tensor in (other._arena, *other.tables.tensors)]
        del other
        assert [ref() for ref in memory] == [None] * len(memory)
    finally:
        gc.enable()


def _steps_of_a_thread(seed, transport):
    """Forty steps of a batch of its own: prompts, decodes, arrivals; every field that a kernel reads."""
    random, found = np.random.default_rng(seed), []
    batch = InputBatch(max_num_reqs=8, max_model_len=256, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=256, transport=transport)
    fresh = iter(range(1, 10**6))
    for step in range(40):
        arrived = {}
        if len(batch) < 8:
            tokens = int(random.integers(1, 20))
            batch.add_request(step, [next(fresh) for _ in range(-(-tokens // 4))])
            arrived[step] = tokens
        for name in batch.needs_block():
            if name not in arrived:
                batch.append_blocks(name, [next(fresh)])
        metadata = builder.build(arrived)
        fields = ("slot_mapping", "positions", "seq_lens", "query_start_loc", "block_table", "paged_kv_indptr")
        found.append((metadata.req_ids, *(getattr(metadata, name).tolist() for name in fields)))
        if random.random() < 0.2:
            batch.remove_request(metadata.req_ids[0])
    return found


@pytest.mark.parametrize("transport", ["auto", "copy"])
def test_two_builders_run_in_two_threads(transport):
    expected = [_steps_of_a_thread(seed, transport) for seed in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda seed: [_steps_of_a_thread(seed, transport) for _ in range(5)], range(2)))
    finally:
        sys.setswitchinterval(before)
    assert found == [[one] * 5 for one in expected]


@pytest.mark.parametrize("made_inside", [True, False])
def test_a_builder_works_in_inference_mode_and_outside_of_it(made_inside):
    """Engines run models in it, and may build, capture or warm up there first."""
    import torch

    backend = Backend(CONFIG)
    inside, outside = torch.inference_mode(made_inside), torch.inference_mode(not made_inside)
    with inside:
        batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
        builder = MetadataBuilder(batch, backend, max_num_batched_tokens=8, transport="copy")
        batch.add_request("a", [3, 5], 4)
        assert builder.build().paged_kv_indices.tolist() == [3, 5]
    with outside:
        metadata = builder.build()
        assert metadata.paged_kv_indices.tolist() == [3, 5]
        assert metadata.slot_mapping.tolist() == [21]
