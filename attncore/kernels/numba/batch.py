"""BatchState: the requests in flight."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.codes import COMPUTED, ENCODER_LENS, PLACE, SYNCED
from attncore.kernels.numba.block_ids import check_row
from attncore.kernels.numba.block_table import TableState, swap_blocks
from attncore.kernels.numba.entrance import Entrance


class BatchState(Entrance):
    def __init__(self, state: Any, decoders: list[TableState], cross: TableState | None) -> None:
        super().__init__()
        self.state, self.decoders, self.cross = state, decoders, cross
        self.capacity = state.shape[1]
        self.num_computed, self.places = state[COMPUTED], state[PLACE]
        for table in decoders:
            table.num_computed = self.num_computed
        if cross is not None:
            cross.num_computed = state[ENCODER_LENS]
        self.version = 0
        self.num_rows = 0
        self.dirty = True
        self.changes = self.max_encoder_len = 0
        self.req_ids: tuple[Any, ...] = ()

    def set_num_rows(self, count: int) -> None:
        check_row(count, self.capacity + 1)
        self.num_rows = count

    def progress(self, row: int) -> tuple[int, int, bool]:
        check_row(row, self.capacity)
        num_computed, encoder_len, encoder_done = self.state[:PLACE, row].tolist()
        return num_computed, encoder_len, bool(encoder_done)

    def start(self, row: int, num_computed: int, encoder_len: int, encoder_done: bool) -> None:
        check_row(row, self.capacity)
        self.state[:PLACE, row] = num_computed, encoder_len, encoder_done

    def set_computed(self, row: int, num_computed: int) -> None:
        check_row(row, self.capacity)
        self.num_computed[row] = num_computed

    def swap(self, moves: tuple[tuple[int, int], ...]) -> None:
        for i, j in moves:
            check_row(i, self.capacity)
            check_row(j, self.capacity)
        self.undo.append(self._restored(np.arange(self.capacity), moves))
        for i, j in moves:
            swap_rows(self, i, j)

    def swap_back(self, moves: tuple[tuple[int, int], ...]) -> tuple[Any, ...]:
        sources = np.arange(self.capacity)
        for i, j in reversed(moves):
            check_row(i, self.capacity)
            check_row(j, self.capacity)
            sources[[i, j]] = sources[[j, i]]
        return self._restored(sources, moves)

    def _restored(self, sources: Any, moves: tuple[tuple[int, int], ...]) -> tuple[Any, ...]:
        """What writes to each moved row what row ``sources[row]`` has now, for ``undo``.

        It may begin anew, so that it cannot exchange: an exchange made twice is none.
        """
        rows = np.unique(np.array(moves, np.intp))
        from_rows = sources[rows]
        before = [(self.state, self.state[:, from_rows])]
        for table in [*self.decoders, self.cross] if self.cross is not None else self.decoders:
            before += [(table.table.T, table.table.T[:, from_rows]), (table.state, table.state[:, from_rows])]
            before[-1][1][SYNCED] = 0
        return self.unswap, before, rows

    def unswap(self, before: list[tuple[Any, Any]], rows: Any) -> None:
        for array, values in before:
            array[:, rows] = values


def swap_rows(batch: BatchState, i: int, j: int) -> None:
    for table in batch.decoders:
        swap_blocks(table.state, table.table, i, j)
    if batch.cross is not None:
        swap_blocks(batch.cross.state, batch.cross.table, i, j)
    batch.state[:, [i, j]] = batch.state[:, [j, i]]
