"""Views of steps whose lengths the device alone knows: overlapped steps, and adopted ones with upper bounds."""

import dataclasses

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import as_on_a_device

from attncore import AdoptedSteps, InputBatch, MetadataBuilder, select
from attncore.builder import (
    BatchSlice,
    ContextParallel,
    context_chunk_metadata,
    context_chunks,
    local_attention_metadata,
    slice_metadata,
)
from attncore.errors import AttncoreError
from attncore.reference import ReferenceBackend

NAMES = ("seq_lens", "seq_start_loc", "paged_kv_indptr", "paged_kv_last_page_len", "slot_mapping")


def backend(host_lengths="bounded"):
    """The reference, said to take upper bounds and to read page lists, so that steps have both."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "block_size": 16}
    config = select(backend="reference", **sizes).create().config
    needs = {"host_needs": frozenset(), "device_needs": frozenset({"paged_kv_indices", "block_table", "slot_mapping"})}
    spec = dataclasses.replace(config.spec, host_lengths=host_lengths, **needs)
    return ReferenceBackend(dataclasses.replace(config, spec=spec))


def batch_of(kernels, computed):
    batch = InputBatch(max_num_reqs=4, max_model_len=256, block_size=16, kernels=kernels)
    tables = [1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12]
    for name, ids, count in zip("abc", tables, computed, strict=True):
        batch.add_request(name, ids, count)
    return batch


def overlapped(kernels, of=None):
    """Two decodes and a prefill. Three drafts of each decode were rejected, which the device alone knows."""
    rejected = torch.zeros(4, dtype=torch.int32)
    builder = MetadataBuilder(
        batch_of(kernels, (27, 28, 30)), of or backend(), max_num_batched_tokens=64, decode_threshold=4,
        num_rejected=rejected, transport="copy",
    )  # fmt: skip
    builder.build({"a": 4, "b": 4, "c": 4})
    rejected[:2] = 3
    return builder, builder.build({"a": 3, "b": 5, "c": 10}, overlapped=True)


def exact(kernels):
    """The same step where the host knows."""
    batch = batch_of(kernels, (28, 29, 34))
    builder = MetadataBuilder(batch, backend(), max_num_batched_tokens=64, decode_threshold=4, transport="copy")
    return builder, builder.build({"a": 3, "b": 5, "c": 10})


def numbers(metadata):
    return {name: getattr(metadata, name).tolist() for name in NAMES}


@pytest.mark.parametrize(
    ("part", "begins"),
    [
        (lambda step: step.prefill_metadata, 1),
        (lambda step: step.decode_metadata, 0),
        (lambda step: slice_metadata(step, BatchSlice(1, 3, 3, 18)), 1),
        (lambda step: slice_metadata(step, BatchSlice(0, 2, 0, 8)), 0),
        (lambda step: slice_metadata(step, BatchSlice(1, 3, 3, 12), block_size=16), 1),
    ],
)
def test_views_of_an_overlapped_step_are_those_of_the_exact_one(kernels, part, begins):
    (_one, step), (_other, same) = overlapped(kernels), exact(kernels)
    found, wanted = part(step), part(same)
    assert numbers(found) == numbers(wanted)
    if not begins:
        held = int(found.paged_kv_indptr[-1])
        assert found.paged_kv_indices[:held].tolist() == wanted.paged_kv_indices[:held].tolist()
    else:
        with pytest.raises(AttncoreError, match="paged_kv_indices of a view begin where the device alone knows"):
            _ = found.paged_kv_indices


def test_a_plan_finds_an_overlapped_step_bounded_and_its_views_are_exact(kernels):
    """A view is kept for the step: what the plan took is what layers have."""
    needs = frozenset({"seq_start_loc", "seq_lens", "query_start_loc"})
    told = []

    class Planning(ReferenceBackend):
        has_plan = True

        def plan(self, metadata):
            view = metadata.prefill_metadata
            told.append((metadata.builder.host_lengths(metadata), view and view.num_reqs))

    config = backend().config
    config = dataclasses.replace(config, spec=dataclasses.replace(config.spec, device_needs=needs))
    _builder, step = overlapped(kernels, Planning(config))
    assert told[-1] == ("bounded", 2)
    assert step.prefill_metadata.seq_start_loc.tolist() == [0, 34, 78]


def adopted(**lengths):
    steps = AdoptedSteps(backend(), max_num_reqs=6, max_num_tokens=64, max_model_len=200, num_blocks=64)
    return steps, steps.build(
        query_start_loc=torch.tensor([0, 10, 22], dtype=torch.int32),
        seq_lens=torch.tensor([20, 30], dtype=torch.int32),
        block_table=torch.arange(10, dtype=torch.int32).reshape(2, 5),
        slot_mapping=torch.arange(22),
        **lengths,
    )


@pytest.mark.parametrize("part", ["decode_metadata", "prefill_metadata"])
def test_views_of_a_view_are_those_of_the_exact_step(kernels, part):
    """A backend may ask a microbatch for its decodes."""
    (builder, step), (_other, same) = overlapped(kernels), exact(kernels)
    for rows in (BatchSlice(0, 2, 0, 8), BatchSlice(1, 3, 3, 18), BatchSlice(1, 3, 4, 16)):
        found, wanted = (slice_metadata(one, rows, block_size=16) for one in (step, same))
        of_found, of_wanted = getattr(found, part), getattr(wanted, part)
        assert (of_found is None) == (of_wanted is None)
        if of_found is not None:
            assert numbers(of_found) == numbers(of_wanted)
            assert builder.host_lengths(of_found) == builder.host_lengths(found) == "bounded"
            assert of_found.host_lengths == found.host_lengths == step.host_lengths == "bounded"
            assert of_wanted.host_lengths == wanted.host_lengths == same.host_lengths == "exact"
            assert repr(of_found).startswith("<DeviceView of step 1: ")
    found, wanted = getattr(step, part), getattr(same, part)
    last = BatchSlice(found.num_reqs - 1, found.num_reqs, found.num_tokens - 2, found.num_tokens)
    found, wanted = (slice_metadata(one, last, block_size=16) for one in (found, wanted))
    assert numbers(found) == numbers(wanted)
    with pytest.raises(ValueError, match=r"^metadata: the host's lengths of this step are bounded, not exact"):
        ContextParallel(2, 0, 8).metadata(found)


def test_views_of_a_view_of_an_adopted_step_are_those_of_the_exact_one():
    (steps, step) = adopted(host_seq_lens=np.array([20, 50], np.int32), bounded=True)
    (_other, same) = adopted()
    found, wanted = (slice_metadata(one.prefill_metadata, BatchSlice(1, 2, 10, 22)) for one in (step, same))
    assert numbers(found.prefill_metadata) == numbers(wanted.prefill_metadata)
    assert steps.host_lengths(found) == steps.host_lengths(found.prefill_metadata) == "bounded"
    assert found.prefill_metadata.host_lengths == step.host_lengths == "bounded"


def test_a_cut_request_has_the_pages_of_its_exact_length():
    (_one, step) = adopted(host_seq_lens=np.array([20, 50], np.int32), bounded=True)
    (_other, same) = adopted()
    found, wanted = (slice_metadata(one, BatchSlice(0, 2, 0, 16), block_size=16) for one in (step, same))
    for name in ("seq_lens", "paged_kv_indptr", "paged_kv_last_page_len"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist()


def test_the_first_rows_of_a_step_whose_lengths_the_host_has_not():
    steps = AdoptedSteps(backend("none"), max_num_reqs=6, max_num_tokens=64, max_model_len=200, num_blocks=64)
    as_on_a_device(steps)
    starts = torch.tensor([0, 1, 13], dtype=torch.int32)
    step = steps.build(
        query_start_loc=starts,
        seq_lens=torch.tensor([20, 30], dtype=torch.int32),
        block_table=torch.arange(10, dtype=torch.int32).reshape(2, 5),
        slot_mapping=torch.arange(13),
        host_query_start_loc=starts.numpy(),
    )
    assert (step.num_decodes, steps.host_lengths(step)) == (1, "none")
    held = int(step.decode_metadata.paged_kv_indptr[-1])
    assert step.decode_metadata.paged_kv_indices[:held].tolist() == [0, 1]
    assert len(step.decode_metadata.paged_kv_indices) == 5
    with pytest.raises(AttncoreError, match="paged_kv_indices of a view begin where the device alone knows"):
        _ = step.prefill_metadata.paged_kv_indices
    for one in (step, step.prefill_metadata):
        with pytest.raises(ValueError, match=r"^metadata: no seq_lens on the host, which slices are made by"):
            slice_metadata(one, BatchSlice(0, 1, 0, 1))


def chunk_of(prefills):
    """Their contexts' first chunk, whose keys are counted on the host."""
    chunks = context_chunks(prefills.host.block_table, prefills.host.context_lens, 16, workspace_tokens=64)
    return context_chunk_metadata(prefills, chunks, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda step: local_attention_metadata(step, 32, 16),
        lambda step: ContextParallel(2, 0, 8).metadata(step),
        lambda step: ContextParallel(2, 0, 8).metadata(step.prefill_metadata),
        lambda step: chunk_of(step.prefill_metadata),
    ],
)
def test_what_is_made_of_the_hosts_lengths_is_refused(kernels, call):
    _builder, step = overlapped(kernels)
    with pytest.raises(ValueError, match=r"^metadata: the host's lengths of this step are bounded, not exact"):
        call(step)


def test_a_list_as_cache_is_read_each_time():
    """Its tensors may be others the next time: what was written last is not written to again."""
    of = backend()
    layer = of.impl("layer", scale=1.0)
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=16)
    batch.add_request("a", [1])
    metadata = MetadataBuilder(batch, of, max_num_batched_tokens=8).build()
    old, new = ([torch.zeros(3, 16, 2, 16) for _ in range(2)] for _ in range(2))
    pair, key = list(old), torch.ones(1, 2, 16)
    layer.write_cache(key, key, pair, metadata)
    pair[:] = new
    layer.write_cache(key, key, pair, metadata)
    assert all(one.any() for one in new)
