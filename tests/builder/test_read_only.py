"""The arrays of every kind of step are read-only for whoever gets them, and cannot be made writable."""

import itertools

import numpy as np
import pytest
import torch
from builder.device.arena_batches import two_requests

from attncore import BackendConfig
from attncore.builder import (
    CommonMetadataBuilder,
    ContextParallel,
    InputBatch,
    KVCacheGroup,
    MetadataBuilder,
    Sequence,
    SequenceGroup,
    context_chunk_metadata,
    context_chunks,
    local_attention_metadata,
    metadata_from_fields,
    new_tokens_metadata,
    slice_by_requests,
    slice_by_tokens,
    slice_metadata,
)
from attncore.builder.fields import ARRAYS
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.builder.read_only import read_only
from attncore.reference import ReferenceBackend


def reference():
    return ReferenceBackend(BackendConfig(2, 1, 8, "float32", 4))


def persistent(kernels):
    """Steps of the persistent builder with every sort of group, an engine's field, and captured sizes."""
    groups = [KVCacheGroup("full", 4), KVCacheGroup("window", 4, sliding_window=8), KVCacheGroup("x", 4, cross=True)]
    batch = InputBatch(max_num_reqs=4, max_model_len=64, groups=groups, max_encoder_len=12, kernels=kernels)
    for name, first in (("a", 1), ("b", 7)):
        ids = {"full": [first, first + 1], "window": [first, first + 1], "x": [first, first + 2]}
        batch.add_request(name, ids, encoder_seq_len=5)
    builder = MetadataBuilder(batch, max_num_batched_tokens=16)
    builder.register_field("extra", np.int32, "request", lambda metadata, out: out.fill(3))
    yield builder.capture(4)
    yield from builder.build({"a": 3}).groups.values()
    yield from builder.build().groups.values()
    yield from builder.build(bucket=4).groups.values()
    yield builder.build_empty(4)
    yield builder.build_profile([3, 1])
    with_trees = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, kernels=kernels)
    with_trees.add_request("a", [1, 2])
    trees = MetadataBuilder(with_trees, max_num_batched_tokens=16, draft_trees=True, decode_threshold=4)
    yield trees.build({"a": 3})
    yield trees.build(trees={"a": [-1, -1]})
    with_spans = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4, spans=True, kernels=kernels)
    with_spans.add_request("a", [1, 2])
    with_spans.set_spans("a", [(1, 3)])
    yield MetadataBuilder(with_spans, max_num_batched_tokens=16).build({"a": 3})


def lists():
    """Steps of the list builder: mixed, advanced, padded, written to buffers, with encoders."""
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16)
    prompts = [SequenceGroup(True, [Sequence(0, 3, 2, [1, 2])], True)]
    decodes = [SequenceGroup(False, [Sequence(1, 1, 3, [3, 4, 5])])]
    yield builder.build(prompts + decodes)
    advanced = builder.build(decodes)
    before = advanced.host.block_table, advanced.host.paged_kv_indices
    advanced.advance_step()
    yield advanced
    assert advanced.host.paged_kv_indices.tolist() == [3, 4]
    assert not any(array.flags.writeable for array in before)
    state = CommonAttentionState(None, builder)
    with state.graph_capture(4):
        yield state.metadata_for_capture(4)
    yield state.build(decodes, state.pad_size(1))
    yield state.prepare(builder.build(decodes, state.pad_size(1)))
    with_encoder = CommonMetadataBuilder(4, encoder_decoder=True)
    yield with_encoder.build([SequenceGroup(True, [Sequence(0, 3, 0, [1])], False, 2, [9])])


def made_of(kernels):
    """What the blocks make of a step."""
    step = MetadataBuilder(two_requests(kernels), max_num_batched_tokens=32).build({"a": 3})
    for size in (slice_by_requests, slice_by_tokens):
        for part in size(step.host.query_lens, 2):
            yield slice_metadata(step, part, block_size=4)
    yield local_attention_metadata(step, 4, 4)
    yield ContextParallel(2, 0, 2).metadata(step)
    prefills = step.prefill_metadata
    chunks = context_chunks(prefills.host.block_table, prefills.host.context_lens, 4, 8)
    yield context_chunk_metadata(prefills, chunks, 0)
    yield new_tokens_metadata(prefills)
    yield metadata_from_fields(step.asdict_zerocopy())


def with_views(steps):
    for step in steps:
        yield from (view for view in (step, step.prefill_metadata, step.decode_metadata) if view is not None)


def arrays_of(step):
    """Every array that a step and its ``host`` have, by name: whatever ``dir`` finds, and no list of names."""
    for owner in (step.host, step):
        for name in dir(owner):
            value = getattr(owner, name, None) if not name.startswith("_") else None
            if isinstance(value, np.ndarray):
                yield name, value


def bases(array):
    """The arrays that an array leads to, by ``base`` and by the ``obj`` of a memoryview."""
    while isinstance(array, np.ndarray | memoryview):
        if isinstance(array, np.ndarray):
            yield array
        array = array.base if isinstance(array, np.ndarray) else array.obj


def writable(steps):
    """The names of arrays that can be written to, or made so."""
    found = set()
    for step in with_views(steps):
        for name, array in arrays_of(step):
            for one in bases(array):
                try:
                    one.flags.writeable = True
                except ValueError:
                    continue
                found.add(name)
    return found


KINDS = [pytest.param(persistent, id="persistent"), pytest.param(lambda _: lists(), id="lists"), made_of]


@pytest.mark.parametrize("steps", KINDS)
def test_no_array_of_a_step_can_be_written_to(kernels, steps):
    assert writable(steps(kernels)) == set()


def test_every_field_is_among_them(kernels):
    """The test above has seen each field of the table, and the engine's own."""
    steps = itertools.chain(persistent(kernels), lists(), made_of(kernels))  # in turn: two arenas hold the steps
    assert {name for step in with_views(steps) for name, _ in arrays_of(step)} >= {*ARRAYS, "extra"}


@pytest.mark.parametrize("steps", KINDS)
def test_an_array_that_is_left_writable_is_found(monkeypatch, kernels, steps):
    """The tests above can fail: a field of the builder's own is handed out as it is."""
    for module in ("slices", "metadata", "persistent.host_fields"):
        faulty = lambda array: array if array.dtype == np.int64 else read_only(array)  # noqa: E731
        for name in ("read_only", "kept"):
            monkeypatch.setattr(f"attncore.builder.{module}.{name}", faulty, raising=False)
    assert "positions" in writable(steps(kernels))


def test_a_write_is_refused_and_reaches_no_later_step(kernels):
    batch = two_requests(kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=32, depth=1)
    step = builder.build({"a": 3})
    for name, array in arrays_of(step):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7
        assert name
    assert builder.build().query_start_loc.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        batch.block_table[0, 0] = 7
    for array in bases(batch.block_table):
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            array.flags.writeable = True


def test_views_follow_an_array_that_is_replaced():
    builder = CommonMetadataBuilder(2, "flashinfer")
    table = [1, 2]
    step = builder.build([SequenceGroup(False, [Sequence(0, 1, 3, table)])])
    host = step.host
    assert (host.seq_lens.tolist(), host.block_table.tolist()) == ([4], [[1, 2]])
    held = host.seq_lens
    table.append(3)
    step.advance_step()
    assert (held.tolist(), host.block_table.tolist(), host.paged_kv_indices.tolist()) == ([5], [[1, 2, 3]], [1, 2, 3])


def test_tensors_on_a_cpu_share_the_memory_and_a_read_only_array_is_copied(kernels):
    backend = reference()
    step = MetadataBuilder(two_requests(kernels), backend, max_num_batched_tokens=32).build({"a": 3})
    assert step.seq_lens.data_ptr() == step.host.seq_lens.ctypes.data
    copied = backend.from_host(step.host.seq_lens)
    copied[0] = 99
    assert 99 not in step.host.seq_lens.tolist()
    assert torch.equal(metadata_from_fields({**step.asdict_zerocopy()}, backend).seq_lens, step.seq_lens)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(
    ("field", "value"), [("paged_kv_indptr", 2**31 - 1), ("paged_kv_indptr", -5), ("context_lens", -9)]
)
def test_a_tensor_that_was_written_to_is_refused_and_not_trusted(kernels, field, value, window):
    builder = CommonMetadataBuilder(4, "flashinfer", sliding_window=window, backend=reference(), kernels=kernels)
    step = builder.build([SequenceGroup(False, [Sequence(0, 1, 3, [1, 2]), Sequence(1, 1, 6, [3, 4])])])
    whole = getattr(step, field).clone()
    for index in range(len(whole)):
        getattr(step, field)[index] = value
        with pytest.raises(ValueError, match=f"metadata: its {field} was changed since the build"):
            step.advance_step()
        getattr(step, field)[:] = whole
        assert step.advanced == 0
    step.advance_step()
    assert step.host.paged_kv_indices.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [[0, 10**7, 2], [0, -1, 2], [1, 1, 2], [0, 1, 10**7]])
def test_page_counts_that_were_written_to_are_refused(kernels, wrong):
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=16, transport="copy")
    batch.add_request("a", [1, 2], 2)
    batch.add_request("b", [3], 2)
    metadata = builder.build()
    metadata.paged_kv_indptr.copy_(torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^metadata: paged_kv_indptr was written to"):
        metadata.paged_kv_indices  # noqa: B018


def test_what_fill_gets_leads_to_no_memory_of_the_builder(kernels):
    builder, given = MetadataBuilder(two_requests(kernels), max_num_batched_tokens=32), []
    builder.register_field("extra", np.int32, "request", lambda metadata, out: given.append(out) or out.fill(3))
    step = builder.build()
    for array in bases(given[0]):
        array[...] = 17
    assert (step.extra.tolist(), step.query_start_loc.tolist()) == ([3, 3], [0, 1, 2])
    assert builder.build().query_start_loc.tolist() == [0, 1, 2]


def test_numpys_ufunc_at_writes_all_the_same_and_moves_nothing_else(kernels):
    plain = read_only(np.zeros(2, np.int32))
    try:
        np.add.at(plain, [0], 1)
    except ValueError:
        pytest.skip("this NumPy looks at the flag; SECURITY.md may say so")
    batch = InputBatch(max_num_reqs=2, max_model_len=16, block_size=4, num_blocks=8, kernels=kernels)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8)
    batch.add_request("a", [1, 2], 3)
    batch.add_request("b", [3, 4], 3)
    np.add.at(batch.block_table, (0, 0), 2**31 - 2)
    metadata = builder.build()
    assert metadata.slot_mapping.tolist() == [(2**31 - 1) * 4 + 3, 15]
    np.add.at(metadata.host.paged_kv_indptr, [1, 2], 2**20)
    with pytest.raises(ValueError, match="paged_kv_indptr: row 0 was changed since the build"):
        metadata.paged_kv_indices  # noqa: B018
    assert batch.block_ids("b") == [3, 4]
