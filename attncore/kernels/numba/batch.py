"""BatchState: the requests in flight."""

from __future__ import annotations

from typing import Any

from attncore.kernels.codes import COMPUTED, ENCODER_LENS
from attncore.kernels.numba.block_table import TableState, swap_blocks


class BatchState:
    def __init__(self, state: Any, decoders: list[TableState], cross: TableState | None) -> None:
        self.state, self.decoders, self.cross = state, decoders, cross
        self.num_computed = state[COMPUTED]
        for table in decoders:
            table.num_computed = self.num_computed
        if cross is not None:
            cross.num_computed = state[ENCODER_LENS]
        self.version = 0
        self.num_rows = 0
        self.dirty = True
        self.changes = self.max_encoder_len = 0
        self.req_ids: tuple[Any, ...] = ()
        self.busy = False

    def enter(self) -> bool:
        busy, self.busy = self.busy, True
        return not busy

    def leave(self) -> None:
        self.busy = False

    def start(self, row: int, num_computed: int, encoder_len: int, encoder_done: bool) -> None:
        self.state[:, row] = num_computed, encoder_len, encoder_done

    def set_computed(self, row: int, num_computed: int) -> None:
        self.num_computed[row] = num_computed

    def swap(self, i: int, j: int) -> None:
        swap_rows(self, i, j)


def swap_rows(batch: BatchState, i: int, j: int) -> None:
    for table in batch.decoders:
        swap_blocks(table.state, table.table, i, j)
    if batch.cross is not None:
        swap_blocks(batch.cross.state, batch.cross.table, i, j)
    batch.state[:, [i, j]] = batch.state[:, [j, i]]
