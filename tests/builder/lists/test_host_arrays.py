"""What is set as a host array of a step is the array that kernels take, whatever its memory was, or is refused."""

import numpy as np
import pytest
from builder.lists.decodes import decodes, fields

from attncore import CommonMetadataBuilder

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
def test_a_table_of_other_memory_advances_alike(kernels, changed):
    builder = CommonMetadataBuilder(4, "flashinfer", kernels=kernels)
    rows = [(1595, list(range(1, 500))), (7, list(range(600, 1099)))]
    metadata, other = (builder.build(decodes(rows)) for _ in range(2))
    other.host.block_table = TABLES[changed](np.array(metadata.host.block_table))
    for _ in range(3):
        metadata.advance_step()
        other.advance_step()
    assert fields(other) == fields(metadata)


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
    assert getattr(host, name) is before


def test_an_array_that_kernels_can_take_is_not_copied():
    host = CommonMetadataBuilder(4).build(decodes([(1, [5])])).host
    table = np.array([[7, 8]], np.int32)
    host.block_table = table
    assert np.shares_memory(host.block_table, table)
