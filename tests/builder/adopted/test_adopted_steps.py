"""AdoptedSteps makes of an engine's tensors what the persistent builder makes of its batch."""

import numpy as np
import pytest
import torch
from builder.adopted.adopted_engine import (
    BLOCK,
    MODEL_LEN,
    Engine,
    as_on_a_device,
    int32,
    reference,
    same_arrays,
    same_counts,
)
from builder.plain_backend import Least, config

from attncore import AdoptedSteps, BackendSpec, MultipleOf
from attncore.builder import ContextParallel, local_attention_metadata, slice_by_tokens, slice_metadata
from attncore.errors import AttncoreError


@pytest.fixture(scope="module")
def backend():
    return reference()


def steps_of(backend, **more):
    most = {"max_num_reqs": 8, "max_num_tokens": 64, "max_model_len": MODEL_LEN, "num_blocks": 200} | more
    return AdoptedSteps(backend, **most)


def given(query_lens, seq_lens, columns=MODEL_LEN // BLOCK, slots=None):
    """An engine's tensors for rows of these lengths."""
    n, tokens = len(query_lens), sum(query_lens)
    table = torch.arange(1, n * columns + 1, dtype=torch.int32).view(n, columns)
    slots = tokens if slots is None else slots
    slot_mapping = torch.full((slots,), -1, dtype=torch.int64)
    slot_mapping[:tokens] = torch.arange(tokens)
    starts = int32(*np.cumsum([0, *query_lens]).tolist())
    return {"query_start_loc": starts, "seq_lens": int32(*seq_lens), "block_table": table, "slot_mapping": slot_mapping}


@pytest.mark.parametrize("threshold", [1, 3])
def test_fields_and_counts_are_the_persistent_builders(backend, kernels, threshold):
    engine = Engine(backend, kernels, decode_threshold=threshold)
    for _ in range(60):
        built, adopted = engine.step()
        same_counts(built, adopted)
        same_arrays(built, adopted)
        for name in ("decode_metadata", "prefill_metadata"):
            views = getattr(built, name), getattr(adopted, name)
            assert (views[0] is None) == (views[1] is None)
            if views[0] is not None:
                same_counts(*views)
                same_arrays(*views)


@pytest.mark.parametrize("features", [{}, {"sliding_window": 7, "logits_soft_cap": 3.0}], ids=str)
def test_outputs_are_the_persistent_builders(backend, kernels, features):
    engine = Engine(backend, kernels, seed=1)
    impl = backend.impl("layers.0", scale=0.3, **features)
    caches = [backend.allocate_kv_cache(200) for _ in range(2)]
    for _ in range(40):
        built, adopted = engine.step()
        query, key, value = (torch.randn(built.num_tokens, heads, 8) for heads in (4, 2, 2))
        expected = impl.forward(query, key, value, caches[0], built)
        torch.testing.assert_close(impl.forward(query, key, value, caches[1], adopted), expected, rtol=0, atol=0)
    torch.testing.assert_close(*caches, rtol=0, atol=0)


def test_on_a_cpu_the_host_reads_the_tensors_themselves(backend):
    tensors = given([1, 1], [5, 9])
    metadata = steps_of(backend).build(**tensors)
    assert metadata.block_table.data_ptr() == tensors["block_table"].data_ptr()
    assert np.shares_memory(metadata.host.block_table, tensors["block_table"].numpy())
    assert np.shares_memory(metadata.host.slot_mapping, tensors["slot_mapping"].numpy())
    assert not metadata.host.slot_mapping.flags.writeable


def test_padding_of_an_eager_step_is_cut(backend):
    metadata = steps_of(backend).build(**given([1, 3, 0, 0], [5, 9, 0, 0], slots=9))
    assert (metadata.num_reqs, metadata.num_tokens, metadata.use_cuda_graph) == (2, 4, False)
    assert metadata.seq_lens.tolist() == metadata.host.seq_lens.tolist() == [5, 9]
    assert len(metadata.block_table) == 2
    assert len(metadata.slot_mapping) == len(metadata.host.slot_mapping) == 4


def test_a_step_without_rows(backend, kernels):
    steps = steps_of(backend, kernels=kernels)
    for tensors in (given([], []), given([0, 0], [0, 0])):
        metadata = steps.build(**tensors)
        assert (metadata.num_reqs, metadata.num_tokens, metadata.max_seq_len) == (0, 0, 0)
        assert metadata.decode_metadata is metadata.prefill_metadata is None
        assert metadata.paged_kv_indptr.tolist() == metadata.seq_start_loc.tolist() == [0]
        assert metadata.positions.tolist() == []


def test_a_table_without_rows_has_the_strides_of_numpy(backend, kernels):
    steps = steps_of(backend, kernels=kernels)
    table = torch.from_numpy(np.zeros((0, 4), np.int32))
    assert table.stride() == (0, 0)
    for _ in range(2):
        metadata = steps.build(**(given([], []) | {"block_table": table}))
        assert (metadata.num_reqs, metadata.paged_kv_indptr.tolist()) == (0, [0])


def test_the_same_tensors_are_the_same_objects_in_the_next_step(backend):
    """A backend may keep a plan by them; an engine makes a new view of its buffers for each step."""
    steps, tensors = steps_of(backend), given([1, 1, 1], [5, 9, 2])
    first = steps.build(**tensors)
    sums = first.seq_start_loc
    again = steps.build(**{name: tensor[:] for name, tensor in tensors.items()})
    assert [getattr(first, name) is getattr(again, name) for name in tensors] == [True] * 4
    assert again.seq_start_loc.data_ptr() == sums.data_ptr()
    other = steps.build(**(tensors | {"seq_lens": tensors["seq_lens"].clone()}))
    assert other.seq_lens is not first.seq_lens


def test_what_was_asked_for_once_is_made_in_every_step(backend):
    """A plan that outlasts its step, and a captured graph, read the sums where they lie."""
    steps, tensors = steps_of(backend), given([1, 1], [5, 9])
    kept = [getattr(steps.build(**tensors), name) for name in ("seq_start_loc", "positions", "paged_kv_indices")]
    tensors["seq_lens"][:] = int32(6, 10)
    steps.build(**tensors)
    assert [one.tolist() for one in kept] == [[0, 6, 16], [5, 9], [1, 2, 16, 17, 18]]


def test_what_a_plan_takes_of_a_view_is_made_again_for_layers(kernels):
    """What a view's numbers are made of is made behind the plan, where earlier steps were asked for it."""
    names = "paged_kv_indptr", "paged_kv_num_pages", "seq_start_loc", "token_to_req_indices", "logits_indices"

    class Planning(Least):
        def plan(self, metadata):
            for one in (metadata, metadata.decode_metadata, metadata.prefill_metadata):
                for name in names:
                    _ = getattr(one, name).shape

    spec = BackendSpec(
        name="least", api=1, factory="nowhere:Least", devices={"any": 0}, dtypes={"float32"}, head_sizes={8},
        block_sizes=MultipleOf(1), device_needs={"paged_kv_indices"},
    )  # fmt: skip
    steps = steps_of(Planning(config(spec)), decode_threshold=2, kernels=kernels)
    as_on_a_device(steps)
    buffers = given([1, 2, 7, 3], [5, 9, 20, 8])
    hosts = {f"host_{name}": buffers[name].clone() for name in ("query_start_loc", "seq_lens")}
    for lengths in ([5, 9, 20, 8], [7, 30, 12, 8], [8, 2, 11, 40], [9, 3, 7, 33]):
        for lens in (buffers["seq_lens"], hosts["host_seq_lens"]):
            lens.copy_(int32(*lengths))
        metadata = steps.build(**buffers, **hosts)
        for one in (metadata, metadata.decode_metadata, metadata.prefill_metadata):
            for name in names:
                assert getattr(one, name).tolist() == getattr(one.host, name).tolist(), name


def test_an_older_step_makes_nothing_new(backend):
    steps, tensors = steps_of(backend), given([1, 1], [5, 9])
    older = steps.build(**tensors)
    steps.build(**tensors)
    with pytest.raises(AttncoreError, match="positions of step 0 was first asked for after step 1 was built"):
        _ = older.positions


def test_host_arrays_are_valid_until_depth_more_builds(backend):
    steps = steps_of(backend, depth=2)
    first = steps.build(**given([1], [5]))
    seen = first.host.seq_lens
    for length in (6, 7):
        steps.build(**given([1], [length]))
        assert seen.tolist() == [5]
    with pytest.raises(ValueError, match="host_seq_lens"):
        steps.build(**given([1], [MODEL_LEN + 1]))
    assert "STALE" in repr(first)


@pytest.fixture
def bounded(kernels):
    return steps_of(Least(config()), kernels=kernels)


def test_upper_bounds_on_the_host(bounded):
    """The device's lengths are exact, and everything there follows from them."""
    tensors = given([1, 1, 4], [5, 9, 8])
    metadata = bounded.build(**tensors, host_seq_lens=np.array([8, 9, 11], np.int32), bounded=True)
    assert bounded.host_lengths(metadata) == "bounded"
    assert metadata.host.seq_lens.tolist() == [8, 9, 11]
    assert metadata.max_seq_len == metadata.max_prefill_seq_len == 11
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 5, 7]
    assert metadata.paged_kv_indices.tolist()[:7] == [1, 2, 16, 17, 18, 31, 32]
    assert metadata.paged_kv_last_page_len.tolist() == [1, 1, 4]
    assert metadata.context_lens.tolist() == [4, 8, 4]
    assert metadata.prefill_metadata.seq_start_loc.tolist() == [0, 8]
    assert metadata.decode_metadata.seq_start_loc.tolist() == [0, 5, 14]
    with pytest.raises(AttncoreError, match="paged_kv_indices of a view begin where the device alone knows"):
        _ = metadata.prefill_metadata.paged_kv_indices


def test_no_lengths_on_the_host(bounded):
    as_on_a_device(bounded)  # where the tensors could be read
    tensors = given([1, 1], [5, 9])
    metadata = bounded.build(**tensors, host_query_start_loc=tensors["query_start_loc"])
    assert bounded.host_lengths(metadata) == "none"
    assert metadata.max_seq_len == MODEL_LEN
    assert metadata.seq_start_loc.tolist() == [0, 5, 14]
    assert metadata.paged_kv_indices.tolist()[:5] == [1, 2, 16, 17, 18]
    for name in ("seq_lens", "paged_kv_indptr", "paged_kv_indices", "block_table", "positions"):
        with pytest.raises(AttributeError, match=f"no field '{name}' in this step"):
            getattr(metadata.host, name)
    assert metadata.host.token_to_req_indices.tolist() == [0, 1]


def test_lengths_of_the_device_reach_no_other_memory(bounded):
    """They are data: what they count is held within the table and the buffer."""
    tensors = given([1, 1, 1], [5, 9, 2])
    host = np.array([5, 9, 2], np.int32)
    buffer = bounded.build(**tensors, host_seq_lens=host).page_buffer
    assert buffer.numel() == 8 * (MODEL_LEN // BLOCK)
    tensors["seq_lens"][:] = int32(2**31 - 1, -5, 2**31 - 1)
    as_on_a_device(bounded)  # where they would be compared
    starts = tensors["query_start_loc"]
    metadata = bounded.build(**tensors, host_query_start_loc=starts, host_seq_lens=host, bounded=True)
    full = MODEL_LEN // BLOCK
    assert metadata.paged_kv_indptr.tolist() == [0, full, full, 2 * full]
    assert metadata.paged_kv_last_page_len.tolist() == [BLOCK, 0, BLOCK]


def test_a_long_table_is_read_as_far_as_a_request_may_reach(backend):
    metadata = steps_of(backend).build(**given([1, 1], [MODEL_LEN, 9], columns=40))
    assert metadata.paged_kv_indices.tolist() == [*range(1, 16), 41, 42, 43]


def test_a_slice_of_a_step_on_a_device_cuts_the_keys_of_its_last_request():
    """Its host has no slots, by which steps of a cross group were told, whose keys no slice cuts."""
    step = given([1, 6], [9, 20])
    hosts = {f"host_{name}": step[name].clone() for name in ("query_start_loc", "seq_lens")}
    steps = steps_of(Least(config()))
    as_on_a_device(steps)
    metadata = steps.build(**step, **hosts)
    first, second = slice_by_tokens(metadata.host.query_lens, 2)
    with pytest.raises(ValueError, match=r"^block_size: needed to slice"):
        slice_metadata(metadata, first)
    pieces = [slice_metadata(metadata, one, block_size=BLOCK) for one in (first, second)]
    assert [piece.seq_lens.tolist() for piece in pieces] == [[9, 16], [20]]
    assert [piece.host.seq_lens.tolist() for piece in pieces] == [[9, 16], [20]]
    assert [piece.query_start_loc.tolist() for piece in pieces] == [[0, 1, 3], [0, 4]]
    assert [piece.max_seq_len for piece in pieces] == [16, 20]
    for part in (
        lambda: local_attention_metadata(metadata, 8, BLOCK),
        lambda: ContextParallel(2, 0, 4).metadata(metadata),
    ):
        with pytest.raises(ValueError, match=r"^metadata: no slot_mapping on the host, as of an adopted step on a dev"):
            part()
