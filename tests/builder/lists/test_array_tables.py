"""Block tables that are arrays: the same step as of lists, whatever their memory is, and the same refusals."""

import numpy as np
import pytest
from builder.lists.decodes import decodes, fields

from attncore.builder import CommonMetadataBuilder
from attncore.slots import compute_slot_mapping

IDS = [5, 9, 2, 7, 2**31 - 1, 11]


class Reversed(np.ndarray):
    """Says other items than its memory has."""

    def __iter__(self):
        return reversed(self.tolist())


def frozen(ids):
    array = np.array(ids, np.int32)
    array.flags.writeable = False
    return array


KINDS = {
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "read-only": frozen,
    "every second": lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
    "backwards": lambda ids: np.array(ids[::-1], np.int32)[::-1],
    "a column": lambda ids: np.array([ids, ids], np.int32).T[:, 0],
    "big-endian": lambda ids: np.array(ids, ">i4"),
    "unaligned": lambda ids: np.frombuffer(b"." + np.array(ids, np.int32).tobytes(), np.int32, -1, 1),
    "a subclass": lambda ids: np.array(ids[::-1], np.int32).view(Reversed),
    "a memoryview": lambda ids: memoryview(np.array(ids, np.int32)),
    "an unaligned cast": lambda ids: memoryview(bytearray(b"." + np.array(ids, np.int64).tobytes()))[1:].cast("q"),
    "objects": lambda ids: np.array(ids, object),
    "a longer one": lambda ids: np.array([*ids, 3, 4], np.int32)[: len(ids)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["common", "flashinfer"])
def test_an_array_is_read_as_the_list_of_its_items(kernels, kind, layout):
    builder = CommonMetadataBuilder(4, layout, kernels=kernels)
    for rows in ([(5, IDS), (0, [3]), (23, IDS)], [(1, IDS[:1])] * 3):
        arrays = [(context, KINDS[kind](ids)) for context, ids in rows]
        assert fields(builder.build(decodes(arrays))) == fields(builder.build(decodes(rows)))


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_step_keeps_its_numbers_when_the_array_changes(kernels, kind):
    table = np.array(IDS, kind)
    metadata = CommonMetadataBuilder(4, "flashinfer", kernels=kernels).build(decodes([(5, table)]))
    before = fields(metadata)
    table[:] = 0
    assert fields(metadata) == before
    table.resize(1000, refcheck=False)  # the array is not held


WRONG = {
    "negative": ([3, -1], r"block_table: .*-1"),
    "the least int32": ([3, -(2**31)], r"block_table: .*-2147483648"),
    "too large": (np.array([3, 2**31]), r"block_table: .*2147483648"),
    "far too large": (np.array([3, 2**32]), r"block_table: .*4294967296"),
    "negative int64": (np.array([3, -(2**63)]), r"block_table: .*-9223372036854775808"),
    "floats": (np.array([3.0, 4.0]), r"block_table"),
    "bools": (np.array([True, False]), r"block_table"),
    "two dimensions": (np.array([[3, 4]], np.int32), r"block_table"),
    "no dimension": (np.array(3, np.int32), r"block_table"),
    "too short": (np.array([3], np.int32), r"sequence 0 holds 1 block but needs 2 for its 6 tokens"),
    "empty": (np.array([], np.int32), r"sequence 0 holds 0 blocks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_are_no_tables_are_refused(kernels, name):
    ids, message = WRONG[name]
    ids = np.array(ids, np.int32) if type(ids) is list else ids
    builder = CommonMetadataBuilder(4, kernels=kernels)
    with pytest.raises((ValueError, TypeError), match=message):
        builder.build(decodes([(5, ids)]))
    assert builder.build(decodes([(5, [3, 4])])).slot_mapping.tolist() == [17]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "stop"), [(6, 7), (0, 7), (3, 16)])
def test_slots_of_one_sequence(kernels, monkeypatch, kind, start, stop):
    monkeypatch.setenv("ATTNCORE_KERNELS", kernels)
    found = {}
    for name, table in (("list", IDS[:4]), ("array", KINDS[kind](IDS[:4]))):
        compute_slot_mapping(False, found.setdefault(name, []), 7, stop, start, 2, 4, {7: table})
        assert all(type(slot) is int for slot in found[name])
    assert found["array"] == found["list"]


@pytest.mark.parametrize("ids", [[3, -1], [3]])
def test_a_sequence_whose_array_is_no_table_is_refused(ids):
    slots = []
    with pytest.raises(ValueError, match=r"-1|holds 1 block but needs 2 for its 5 tokens"):
        compute_slot_mapping(False, slots, 7, 5, 4, 0, 4, {7: np.array(ids, np.int32)})
    assert slots == []


def test_numba_reads_arrays_in_the_compiled_call_and_others_by_numpy(monkeypatch):
    """Where NumPy's arrays were laid out otherwise, the longer way would read them: the same numbers."""
    groups = pytest.importorskip("attncore.kernels.numba.sequence_groups", reason="numba is not installed")
    rows = decodes([(5, np.array(IDS, np.int32)), (0, np.array([3], np.int64))])
    reader = groups.GroupReader()
    assert reader._read_in_one(rows)
    assert reader.ids.tolist() == [*IDS, 3]
    assert not reader._read_in_one(decodes([(5, np.array([5, 1 << 31]))]))
    assert not reader._read_in_one(decodes([(5, np.array([5, -1], np.int32))]))
    monkeypatch.setattr(groups, "arrays_are_known", lambda: False)
    other = groups.GroupReader()
    assert not other._read_in_one(rows)
    assert other.read(rows)
    assert other.ids.tolist() == [*IDS, 3]
