"""Steps built while the last one runs: bounds on the host, exact lengths on the device."""

import numpy as np
import pytest
import torch
from late_verdicts import drafts_judged_late

from attncore import select
from attncore.builder import ContextParallel, InputBatch, MetadataBuilder
from attncore.builder.persistent import overlap


@pytest.mark.parametrize("seed", range(6))
def test_the_device_knows_exact_lengths(kernels, seed):
    drafts_judged_late(kernels, seed)


@pytest.mark.parametrize("given", ["no", 1, None, 0])
def test_overlapped_is_true_or_false(kernels, given):
    _, builder = two_requests(kernels)
    with pytest.raises(TypeError, match=r"^overlapped: .* is not True or False$"):
        builder.build(query_len=3, overlapped=given)
    assert builder.build(query_len=3, overlapped=True).seq_lens.tolist() == [8, 6]


def test_without_num_rejected_nothing_overlaps():
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy")
    batch.add_request("a", [1, 2], 3)
    with pytest.raises(ValueError, match="overlapped: this builder was made without num_rejected"):
        builder.build(overlapped=True)
    assert batch.num_computed_tokens("a") == 3


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (np.zeros(2, np.int32), {}, "num_rejected: ndarray .* found; give a torch int32 tensor"),
        (torch.zeros(3, dtype=torch.int32), {}, r"num_rejected: torch.int32\[3\] found"),
        (torch.zeros(2, dtype=torch.int64), {}, r"num_rejected: torch.int64\[2\] found"),
        (torch.zeros(2, dtype=torch.int32), {"transport": "auto"}, "num_rejected: steps are read where they are built"),
        (
            torch.zeros(2, dtype=torch.int32),
            {"context_parallel": ContextParallel(2, 0, 2)},
            "num_rejected: not with context_parallel",
        ),
    ],
)
def test_what_overlapping_needs(given, options, message):
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    with pytest.raises(ValueError, match=message):
        MetadataBuilder(batch, max_num_batched_tokens=8, num_rejected=given, **{"transport": "copy"} | options)


def two_requests(kernels, names=("a", "b")):
    """A batch of two requests, and a builder each of whose steps has two rejected tokens a row; one step is built."""
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=16, kernels=kernels)
    rejected = torch.full((4,), 2, dtype=torch.int32)
    builder = MetadataBuilder(
        batch, max_num_batched_tokens=64, decode_threshold=4, transport="copy", num_rejected=rejected
    )
    for row, computed in enumerate((4, 2)):
        batch.add_request(names[row], [4 * row + k for k in range(1, 5)], computed)
    builder.build(query_len=3)
    return batch, builder


@pytest.mark.parametrize("others", [{}, {"b": 0}])
def test_a_request_with_the_name_of_one_that_left_is_exact(kernels, others):
    batch, builder = two_requests(kernels)
    batch.remove_request("a")
    batch.add_request("a", [9, 10, 11, 12], 8)
    metadata = builder.build(others, query_len=3, overlapped=True)
    assert metadata.seq_lens.tolist() == ([11] if others else [11, 6])
    assert metadata.slot_mapping.tolist()[:3] == [152, 153, 154]
    assert metadata.host.previous_rows.tolist() == ([-1] if others else [-1, 1])
    assert builder.build(query_len=3, overlapped=True).seq_lens.tolist()[0] == 12  # 14 less the two of its own


def test_a_preempted_request_begins_anew(kernels):
    batch, builder = two_requests(kernels)
    batch.preempt("a")
    batch.append_blocks("a", [9, 10])
    metadata = builder.build({"a": 20}, query_len=3, overlapped=True)
    lens = dict(zip(metadata.req_ids, metadata.seq_lens.tolist(), strict=True))
    assert lens == {"a": 20, "b": 6}
    assert dict(zip(metadata.req_ids, metadata.host.previous_rows.tolist(), strict=True)) == {"a": -1, "b": 1}


def test_a_removal_that_fails_is_no_removal(kernels, monkeypatch):
    batch, builder = two_requests(kernels)

    def fail(*args):
        raise RuntimeError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(batch._core.order, "remove", fail)
        with pytest.raises(RuntimeError, match="not now"):
            batch.remove_request("a")
    metadata = builder.build(query_len=3, overlapped=True)
    assert metadata.host.previous_rows.tolist() == [0, 1]
    assert metadata.seq_lens.tolist() == [8, 6]


def test_an_empty_step_has_exact_lengths_whatever_the_build_before_it_was():
    batch = InputBatch(max_num_reqs=2, max_model_len=32, block_size=4)
    num_rejected = torch.zeros(2, dtype=torch.int32)
    builder = MetadataBuilder(batch, max_num_batched_tokens=8, transport="copy", num_rejected=num_rejected)
    builder.capture(2)
    batch.add_request("a", [1], 3)
    assert builder.host_lengths(builder.build(overlapped=True)) == "bounded"
    with pytest.raises(ValueError, match="request 'a'"):
        builder.build(overlapped=True)  # no block
    assert builder.host_lengths(builder.build_empty(2)) == "exact"


@pytest.mark.parametrize("overlapped", [False, True])
def test_verdicts_are_subtracted_once_where_all_requests_rested_meanwhile(kernels, overlapped):
    """The host has them by then, so that the lengths of the step behind that without rows are exact."""
    batch, builder = two_requests(kernels)
    rest = {"a": 0, "b": 0}
    if overlapped:
        builder.build(rest, overlapped=True)
        batch.rollback_many({"a": 2, "b": 2})
    else:
        batch.rollback_many({"a": 2, "b": 2})
        builder.build(rest)
    metadata = builder.build(query_len=3, overlapped=True)
    assert metadata.host.previous_rows.tolist() == [-1, -1]
    assert (metadata.context_lens.tolist(), metadata.seq_lens.tolist()) == ([5, 3], [8, 6])
    assert metadata.slot_mapping.tolist() == [21, 22, 23, 83, 84, 85]


@pytest.mark.parametrize("dummy", [lambda builder: builder.build_empty(2), lambda builder: builder.capture(3)])
def test_a_dummy_step_is_none_whose_verdicts_are_awaited(kernels, dummy):
    """Neither ``build_empty`` nor ``capture`` is a step of the engine's: verdicts of the one before may come later."""
    batch, builder = two_requests(kernels)
    builder.capture(2)
    dummy(builder)
    metadata = builder.build(query_len=3, overlapped=True)
    assert (metadata.host.previous_rows.tolist(), metadata.seq_lens.tolist()) == ([0, 1], [8, 6])
    batch.rollback_many({"a": 2, "b": 2})
    assert builder.build(query_len=3, overlapped=True).seq_lens.tolist() == [9, 7]


@pytest.mark.parametrize("rests", [{}, {"a": 0, "b": 0}])
def test_a_build_that_fails_behind_its_last_stage_is_forgotten(kernels, rests, monkeypatch):
    _, builder = two_requests(kernels)
    remember = overlap.Overlap.remember

    def fail(*args, **options):
        remember(*args, **options)
        raise RuntimeError("not now")

    before = builder._overlap.steps
    with monkeypatch.context() as patch:
        patch.setattr(overlap.Overlap, "remember", fail)
        with pytest.raises(RuntimeError, match="not now"):
            builder.build(rests, query_len=3, overlapped=True)
    assert builder._overlap.steps == before
    assert builder.build(query_len=3, overlapped=True).seq_lens.tolist() == [8, 6]


def test_pages_of_a_step_whose_rejected_drafts_give_a_page_back(kernels):
    """The host counts at most so many pages; on the device there are fewer."""
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=4, kernels=kernels)
    rejected = torch.full((2,), 3, dtype=torch.int32)
    builder = MetadataBuilder(
        batch, max_num_batched_tokens=16, decode_threshold=4, transport="copy", num_rejected=rejected
    )
    batch.add_request("a", [5, 6, 7, 8], 3)
    builder.build(query_len=4)
    metadata = builder.build(overlapped=True)
    assert metadata.seq_lens.tolist() == [5]
    assert metadata.paged_kv_indptr.tolist() == [0, 2]
    assert metadata.paged_kv_indices.tolist()[:2] == [5, 6]


def _beyond_its_memory():
    tensor = torch.zeros(1, dtype=torch.int32)
    tensor.untyped_storage().resize_(16)
    tensor.resize_(4)
    tensor.untyped_storage().resize_(4)
    return tensor


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.zeros((4, 2), dtype=torch.int32)[:, 0], r"strides \(2,\) found"),
        (lambda: torch.zeros(1, dtype=torch.int32).expand(4), r"strides \(0,\) found"),
        (lambda: torch.zeros(4, dtype=torch.int32).to_sparse(), "of layout torch.sparse_coo"),
        (lambda: torch._neg_view(torch.zeros(4, dtype=torch.int32)), "a lazy negative"),
        (_beyond_its_memory, ".* reaches beyond the tensor's memory"),
        (lambda: torch.zeros(4, dtype=torch.int32, device="meta"), "on meta, but the steps go to cpu"),
        (lambda: torch.zeros(4, dtype=torch.int32).as_subclass(_Subclass), "_Subclass .* found; give a torch int32"),
    ],
    ids=["every second", "expanded", "sparse", "negative", "beyond", "meta", "subclass"],
)
def test_rejected_counts_that_cannot_be_read_by_address_are_refused(make, said):
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=16)
    with pytest.raises(ValueError, match=f"^num_rejected: {said}"):
        MetadataBuilder(batch, max_num_batched_tokens=64, transport="copy", num_rejected=make())


def test_the_device_of_rejected_counts_is_compared_with_its_index(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    one = torch.device("cuda:1")
    assert [overlap._is_on(one, name) for name in ("cuda", "cuda:1", "cuda:0", "cpu")] == [True, True, False, False]
    assert overlap._is_on(torch.device("cpu"), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_rejected_counts_of_another_gpu_are_refused():
    backend = select(backend="reference", num_heads=2, num_kv_heads=2, head_size=8).create("cuda:0")
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=backend.config.block_size)
    for device in (1, 0):
        given = torch.zeros(4, dtype=torch.int32, device=f"cuda:{device}")
        options = {"max_num_batched_tokens": 64, "transport": "copy", "num_rejected": given}
        if device:
            with pytest.raises(ValueError, match=r"^num_rejected: on cuda:1, but the steps go to cuda:0"):
                MetadataBuilder(batch, backend, **options)
        else:
            MetadataBuilder(batch, backend, **options).close()


def test_a_batch_that_says_less_of_itself_has_as_many_rows():
    """A kernel reads ``num_rejected`` by row."""

    class Less(InputBatch):
        max_num_reqs = 1

    batch = Less(max_num_reqs=4, max_model_len=64, block_size=4)
    with pytest.raises(ValueError, match="give a torch int32 tensor of max_num_reqs 4"):
        MetadataBuilder(
            batch, max_num_batched_tokens=32, num_rejected=torch.zeros(1, dtype=torch.int32), transport="copy"
        )


def test_lengths_are_known_to_be_bounds_for_as_long_as_host_arrays_are_valid():
    batch = InputBatch(max_num_reqs=4, max_model_len=64, block_size=4)
    rejected = torch.zeros(4, dtype=torch.int32)
    builder = MetadataBuilder(
        batch, max_num_batched_tokens=32, decode_threshold=3, num_rejected=rejected, depth=12, transport="copy"
    )
    batch.add_request("a", [*range(1, 16)])
    steps = [builder.build(), *(builder.build(overlapped=True) for _ in range(10))]
    assert [builder.host_lengths(step) for step in steps] == ["exact", *["bounded"] * 10]
