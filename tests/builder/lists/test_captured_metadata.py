"""What a captured size's metadata says of the step that the buffers hold: nothing is left of the step before."""

import numpy as np
import pytest
from builder.lists.captured_state import decodes, made

SHORT, LONG = decodes([(1, [3]), (2, [5])]), decodes([(9, [1, 2, 3]), (5, [4, 5])])
KEY = "a backend's"


@pytest.fixture
def captured(kernels):
    """(state, builder, the captured metadata of two requests)."""
    builder, state = made("flashinfer", kernels=kernels)
    return state, builder, state.prepare(builder.build(SHORT, 0))


def in_place(state, builder, groups):
    state.build(groups, 0)


def prepared(state, builder, groups):
    state.prepare(builder.build(groups, 0))


@pytest.mark.parametrize("write", [in_place, prepared])
def test_derived_fields_follow_the_step(captured, write):
    state, builder, metadata = captured
    for groups, pages in ((SHORT, [1, 1]), (LONG, [3, 2]), (SHORT, [1, 1])):
        write(state, builder, groups)
        assert metadata.host.paged_kv_num_pages.tolist() == pages
        assert metadata.paged_kv_num_pages.tolist() == pages
        assert metadata.host.paged_kv_num_pages.dtype == np.int32


@pytest.mark.parametrize("write", [in_place, prepared])
def test_what_a_backend_kept_lives_as_long_as_the_step(captured, write):
    state, builder, metadata = captured
    for groups in (SHORT, LONG):
        write(state, builder, groups)
        assert not metadata.kept
        metadata.kept[KEY] = groups


def test_an_empty_step_for_another_capture_has_nothing_of_the_last(captured):
    state, builder, metadata = captured
    prepared(state, builder, LONG)
    assert metadata.paged_kv_num_pages.tolist() == metadata.host.paged_kv_num_pages.tolist() == [3, 2]
    assert metadata.block_table_bound.tolist() == [0, 0]
    metadata.kept[KEY] = "of LONG"
    with state.graph_capture(4):
        assert state.metadata_for_capture(2) is metadata
    assert metadata.paged_kv_num_pages.tolist() == metadata.host.paged_kv_num_pages.tolist() == [0, 0]
    assert not metadata.kept
    assert "_bound" not in vars(metadata)


def test_host_arrays_of_a_captured_size_name_a_missing_field(captured):
    _, _, metadata = captured
    with pytest.raises(AttributeError, match=r"metadata.host has no field 'encoder_seq_lens'"):
        _ = metadata.host.encoder_seq_lens


def test_a_step_built_in_place_has_derived_fields(captured):
    state, _, _ = captured
    assert state.build(LONG, 0).host.paged_kv_num_pages.tolist() == [3, 2]
    assert state.build(SHORT, 0).host.paged_kv_num_pages.tolist() == [1, 1]


def test_graph_capture_decorates_a_function_that_is_called_again(captured):
    state, _, metadata = captured

    @state.graph_capture(4)
    def of_two():
        return state.metadata_for_capture(2)

    assert of_two() is of_two() is metadata
