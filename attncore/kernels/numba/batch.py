"""BatchState: the requests in flight."""

from __future__ import annotations

from typing import Any

import numpy as np

from attncore.kernels.codes import COMPUTED, ENCODER_DONE, ENCODER_LENS, PLACE, SYNCED
from attncore.kernels.numba.block_ids import check_row
from attncore.kernels.numba.block_table import TableState, swap_blocks
from attncore.kernels.numba.entrance import Entrance
from attncore.kernels.numba.memory import Struct, Words, address_of, number

BATCH = Struct(
    "num_computed", "encoder_lens", "encoder_done", "places", "capacity", "decoders", "num_decoders", "cross", "taken",
    "num_rows", "dirty", "version", "changes", "named",
)  # fmt: skip
"""What loops know of a batch: addresses of the state's rows, of the tables' structs and of Entrance.taken.

``named`` grows with each new ``req_ids``.
"""
BATCH_VIEW = BATCH.type


class BatchState(Words, Entrance):
    num_rows = number(BATCH, "num_rows")
    version = number(BATCH, "version")
    changes = number(BATCH, "changes")
    dirty = number(BATCH, "dirty")
    named = number(BATCH, "named")

    def __init__(self, state: Any, decoders: list[TableState], cross: TableState | None) -> None:
        super().__init__()
        self.state, self.decoders, self.cross = state, decoders, cross
        self.capacity = state.shape[1]
        self.num_computed, self.places = state[COMPUTED], state[PLACE]
        for table in decoders:
            table.follow(self.num_computed)
        if cross is not None:
            cross.follow(state[ENCODER_LENS])
        self._views = np.array([table.address for table in decoders], np.int64)
        rows = (address_of(state[row], np.int32) for row in (COMPUTED, ENCODER_LENS, ENCODER_DONE, PLACE))
        self._own(
            BATCH, **dict(zip(BATCH.names, rows, strict=False)), capacity=self.capacity, num_decoders=len(decoders),
            decoders=address_of(self._views, np.int64), cross=cross.address if cross is not None else 0,
            taken=address_of(self.taken, np.int64), dirty=True,
        )  # fmt: skip
        self.max_encoder_len = 0
        self._req_ids: tuple[Any, ...] = ()

    @property
    def req_ids(self) -> tuple[Any, ...]:
        return self._req_ids

    @req_ids.setter
    def req_ids(self, req_ids: tuple[Any, ...]) -> None:
        self.named += 1  # before: an interrupt in between leaves the old ones, under another number
        self._req_ids = req_ids

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
