"""A row or a number of rows that is none is refused where kernels use it, whoever names it."""

import numpy as np
import pytest

from attncore.builder import InputBatch

NUM_ROWS = 4
CALLS_WITH_A_ROW = {
    "start": lambda batch, table, row: batch.start(row, 1, 0, False),
    "set_computed": lambda batch, table, row: batch.set_computed(row, 1),
    "progress": lambda batch, table, row: batch.progress(row),
    "swap": lambda batch, table, row: batch.swap(((0, row),)),
    "swap_back": lambda batch, table, row: batch.swap_back(((row, 0),)),
    "table.start": lambda batch, table, row: table.start(row),
    "append": lambda batch, table, row: table.append(row, [1], -1),
    "truncate": lambda batch, table, row: table.truncate(row, 0),
    "replace": lambda batch, table, row: table.replace(row, 0, 1),
    "num_columns": lambda batch, table, row: table.num_columns(row),
}
CALLS_WITH_A_COUNT = {
    "set_num_rows": lambda batch, table, count: batch.set_num_rows(count),
    "pass_windows": lambda batch, table, count: table.pass_windows(count, 4, 0, []),
    "needs_block": lambda batch, table, count: table.needs_block(count, np.zeros(9, np.int32)),
    "needs_block of few": lambda batch, table, count: table.needs_block(min(count, 2), np.zeros(1, np.int32)),
}


@pytest.mark.parametrize("value", [-1, NUM_ROWS, NUM_ROWS + 1, 2**31 - 1])
@pytest.mark.parametrize("name", [*CALLS_WITH_A_ROW, *CALLS_WITH_A_COUNT])
def test_a_row_that_is_none(kernels, name, value):
    core = InputBatch(max_num_reqs=NUM_ROWS, max_model_len=32, block_size=4, kernels=kernels)._core
    table = core.tables["decoder"]
    before = core.lengths.copy(), table.array.copy(), table._lengths.copy()
    call = CALLS_WITH_A_ROW.get(name)
    if call is None:
        call, value = CALLS_WITH_A_COUNT[name], value + (value == NUM_ROWS)
    with pytest.raises(IndexError):
        call(core.state, table.state, value)
    for array, then in zip((core.lengths, table.array, table._lengths), before, strict=True):
        assert np.array_equal(array, then)
    assert not core.undo
