"""What is set as a host array of a step is the array that kernels take, whatever its memory was, or is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
from builder.lists.decodes import decodes, fields

from attncore import CommonMetadataBuilder
from attncore.builder.lists.capture_state import CommonAttentionState
from attncore.builder.slices import HostArrays, replaced

TABLES = {
    "reversed": lambda table: np.ascontiguousarray(table[:, ::-1])[:, ::-1],
    "by columns": np.asfortranarray,
    "every second": lambda table: np.repeat(table, 2, axis=1)[:, ::2],
    "int64": lambda table: table.astype(np.int64),
    "big-endian": lambda table: table.astype(">i4"),
    "read-only": lambda table: np.frombuffer(table.tobytes(), np.int32).reshape(table.shape),
    "unaligned": lambda table: np.frombuffer(bytearray(b"." + table.tobytes()), np.int32, -1, 1).reshape(table.shape),
    "a list": lambda table: table.tolist(),
}


@pytest.mark.parametrize("changed", TABLES)
def test_a_table_of_other_memory_is_the_same_table(kernels, changed):
    builder = CommonMetadataBuilder(4, "flashinfer", kernels=kernels)
    rows = [(1595, list(range(1, 500))), (7, list(range(600, 1099)))]
    metadata, other = (builder.build(decodes(rows)) for _ in range(2))
    other.host.block_table = TABLES[changed](np.array(metadata.host.block_table))
    assert fields(other) == fields(metadata)


def delete(metadata):
    del metadata.host.context_lens


def shrink(metadata):
    metadata.advance_step()
    metadata.host.query_lens = [1]


def another(metadata):
    metadata.host = CommonMetadataBuilder(4, "flashinfer").build(decodes([(1, [5])])).host


class Sets:
    """A block id that sets a field of the step when it is read."""

    metadata = None

    def __index__(self):
        if self.metadata is not None:
            self.metadata.host.paged_kv_indptr = np.array([1000] * 3, np.int32)
        return 3


CHANGES = {
    "seq_lens": lambda metadata: setattr(metadata.host, "seq_lens", [5, 8]),
    "query_lens": shrink,
    "context_lens": delete,
    "host": another,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_whose_arrays_were_set_does_not_advance(kernels, name):
    metadata = CommonMetadataBuilder(4, "flashinfer", kernels=kernels).build(decodes([(3, [1, 2]), (7, [3, 4, 5])]))
    CHANGES[name](metadata)
    before = metadata.advanced
    with pytest.raises(ValueError, match=f"^metadata: its {name} was changed since the build"):
        metadata.advance_step()
    assert metadata.advanced == before


@pytest.mark.parametrize("name", ["block_table", "seq_lens", "query_lens", "logits_indices", "token_to_req_indices"])
def test_a_step_on_which_an_array_was_set_does_not_advance(kernels, name):
    """On the metadata itself: it would say other numbers than its host."""
    metadata = CommonMetadataBuilder(4, kernels=kernels).build(decodes([(1, [5, 6])]))
    setattr(metadata, name, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=f"^metadata: its {name} was changed since the build"):
        metadata.advance_step()
    assert (metadata.advanced, metadata.host.seq_lens.tolist()) == (0, [2])


def test_a_shape_that_is_set_in_place_does_not_reach_the_next_step(kernels):
    builder = CommonMetadataBuilder(4, "flashinfer", kernels=kernels)
    clean, metadata = (builder.build(decodes([(1, [5, 6]), (2, [7])])) for _ in range(2))
    for owner in (metadata.host, metadata):
        for name in ("slot_mapping", "block_table", "logits_indices", "query_start_loc"):
            array = getattr(owner, name)
            array.shape = (*array.shape, 1)
            array.dtype = np.int8
    for step in (clean, metadata):
        step.advance_step()
    assert fields(metadata) == fields(clean)
    assert metadata.slot_mapping.dtype == np.int64


def test_a_block_id_that_sets_an_array_stops_the_advance(kernels):
    last = Sets()
    metadata = CommonMetadataBuilder(4, "flashinfer", kernels=kernels).build(decodes([(2, [1, last]), (6, [3, 4, 5])]))
    metadata.advance_step()
    last.metadata = metadata
    with pytest.raises(ValueError, match=r"^metadata: its paged_kv_indptr was changed since the build"):
        metadata.advance_step()
    assert metadata.advanced == 1


FIELDS = "slot_mapping", "positions", "seq_lens", "context_lens", "query_lens", "query_start_loc", "seq_start_loc"
PAGES = "logits_indices", "block_table", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"


@pytest.mark.parametrize("name", FIELDS + PAGES)
@pytest.mark.parametrize("length", [1, 9])
def test_a_step_of_other_shapes_is_not_prepared_and_changes_no_buffer(name, length):
    builder = CommonMetadataBuilder(4, "flashinfer", max_seq_len_to_capture=16)
    state = CommonAttentionState(None, builder)
    with state.graph_capture(4):
        captured = state.metadata_for_capture(4)
    first = builder.build(decodes([(2, [1]), (6, [3, 4])]), 2)
    state.prepare(first)
    before = fields(captured)
    second = builder.build(decodes([(3, [7]), (7, [8, 9])]), 2)
    setattr(second.host, name, np.zeros((length, 2) if name == "block_table" else length, np.int64))
    with pytest.raises(ValueError, match=r"^metadata: (a|its) "):
        state.prepare(second)
    assert fields(captured) == before
    state.begin_forward(first)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("block_table", None, r"object\[\]"),
        ("block_table", [1, 2], r"int64\[2\]"),
        ("block_table", [[2**31]], r"int64\[1, 1\]; it must hold numbers of int32"),
        ("seq_lens", [1.5], r"float64\[1\]"),
        ("seq_lens", [[1], [2, 3]], "list cannot be read as an array"),
        ("slot_mapping", np.array([2**63], np.uint64), r"uint64\[1\]; it must hold numbers of int64"),
    ],
)
def test_what_is_no_array_of_the_field_is_refused(name, value, text):
    host = CommonMetadataBuilder(4).build(decodes([(1, [5])])).host
    before = getattr(host, name)
    with pytest.raises(ValueError, match=rf"^metadata\.host\.{name}: {text}"):
        setattr(host, name, value)
    assert np.array_equal(getattr(host, name), before)
    assert np.shares_memory(getattr(host, name), before)


def test_an_array_that_kernels_can_take_is_not_copied():
    host = CommonMetadataBuilder(4).build(decodes([(1, [5])])).host
    table = np.array([[7, 8]], np.int32)
    host.block_table = table
    assert np.shares_memory(host.block_table, table)


@pytest.mark.parametrize(
    "change", [lambda host: setattr(host, "seq_lens", [4]), lambda host: delattr(host, "seq_lens")]
)
def test_the_mark_of_a_replaced_array_is_set_before_the_array(change):
    class Interrupted(SimpleNamespace):
        def __setattr__(self, name, value):
            raise KeyboardInterrupt

        __delattr__ = lambda self, name: setattr(self, name, None)  # noqa: E731

    host = HostArrays(seq_lens=np.array([3], np.int32))
    vars(host)["_arrays"] = Interrupted(**vars(host._arrays))
    with pytest.raises(KeyboardInterrupt):
        change(host)
    assert replaced(host) == "seq_lens"
