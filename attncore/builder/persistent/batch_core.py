"""The state that an InputBatch shares with the builder over it: tables, lengths by row, the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from attncore.builder.blocks.spans import NONE
from attncore.builder.device.memory import zeros
from attncore.builder.persistent.block_table import BlockTable
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.builder.persistent.request_rows import READS, RequestRows
from attncore.errors import ConcurrentUseError
from attncore.kernels import KernelsName, codes, load_kernels

Moves = tuple[tuple[int, int], ...]
T = TypeVar("T")


class BatchCore:
    """The block tables by group name (decoder groups first), the kernels' BatchState and the order of rows.

    A call changes them inside ``with core.enter():``, and appends to ``undo`` first how each change is taken back: it
    then happens fully or not at all, whatever interrupts it (see the kernels' Entrance).
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroup, ...],
        max_num_reqs: int,
        max_model_len: int,
        max_encoder_len: int,
        kernels: KernelsName | None,
    ) -> None:
        self.groups, self.max_model_len, self.max_encoder_len = groups, max_model_len, max_encoder_len
        self.kernels = load_kernels(kernels)
        self.tables = {
            group.name: BlockTable(group, max_num_reqs, max_encoder_len if group.cross else max_model_len, self.kernels)
            for group in groups
        }
        tables = list(self.tables.values())
        has_cross = groups[-1].cross
        self.decoders = tables[:-1] if has_cross else tables
        self.cross: BlockTable | None = tables[-1] if has_cross else None
        self.lengths: npt.NDArray[np.int32] = zeros((4, max_num_reqs), np.int32)
        """By row: ``codes.COMPUTED``, ``ENCODER_LENS``, ``ENCODER_DONE``, ``PLACE``."""
        self.lengths[codes.PLACE] = np.arange(max_num_reqs)
        self.added_at = zeros(max_num_reqs, np.int64)
        """By place: ``state.changes`` when its request was added. A step of fewer has none of this request."""
        self.columns: dict[str, Any] = {}  # Column, by name
        self.state = self.kernels.BatchState(
            self.lengths, [table.state for table in self.decoders], self.cross.state if self.cross else None
        )
        self.state.max_encoder_len = max_encoder_len
        self.state.refused = partial(
            ConcurrentUseError, "batch: a caller is inside it or its builder already, in this thread or another"
        )
        self.enter: Callable[[], Any] = self.state.enter
        self.undo: list[tuple[Any, ...]] = self.state.undo
        self.order = RequestRows()
        self.states: dict[str, Any] = {}  # StateSlots, by group of states, in the order given
        self.follower: Callable[[], Any] | None = None
        """A weak reference to the builder whose device tables are kept in step with these."""
        self.overlap: Any = None
        """The follower's Overlap, where its steps overlap: it hears which requests leave or are preempted."""
        self.ahead: Any = None
        """The StepsAhead of the last ``run_ahead``: it hears which requests leave or are preempted."""
        self.ran_trees: dict[int, Any] | None = None
        """Draft trees of earlier steps, by their request's place, until it runs again; None where no builder of the
        batch takes any. All of its builders look at them: what runs behind a tree sees what it left. Each change makes
        another dict.
        """
        self.spans: Any = None
        """The requests' Spans; None where the batch was made without."""
        self.moving = False
        """Whether a build has moved rows whose order does not say so yet."""
        self._scratch = zeros(max_num_reqs, np.int32)
        self._num_changes = 0
        self._moved = -1, 0
        """What ``state.changes`` is since the last step that moved rows, and what it was before."""

    def append_plain(self, *, one_group: bool) -> Callable[[Any], bool] | None:
        """The kernels' ``append_blocks`` for the batch's only group, of blocks by request, or the one of blocks by
        request and group; numba has none.
        """
        if not hasattr(self.kernels, "append_blocks"):
            return None
        if one_group:
            return partial(self.kernels.append_blocks, self.state, self.decoders[0].state, self.order)
        tables = tuple(table.state for table in self.decoders)
        names = tuple(table.group.name for table in self.decoders)
        return partial(self.kernels.append_blocks_by_group, self.state, tables, names, self.order)

    def roll_back_plain(self) -> Callable[[Any], bool] | None:
        """The kernels' ``roll_back``, of tokens by request, for batches without windows and states; numba has none."""
        windows = any(table.group.sliding_window is not None for table in self.decoders)
        if windows or self.states or not hasattr(self.kernels, "roll_back"):
            return None
        return partial(self.kernels.roll_back, self.state, self.order)

    @property
    def max_num_reqs(self) -> int:
        return self.state.capacity  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Host memory of tables and lengths, bytes."""
        own = self.lengths.nbytes + self.added_at.nbytes + self._scratch.nbytes
        held = sum(table.nbytes for table in self.tables.values()) + sum(slots.nbytes for slots in self.states.values())
        return int(held + own + (self.spans.nbytes if self.spans is not None else 0))

    def settle(self) -> None:
        """Undoes what an interrupted call has left, for callers that read without entering."""
        if self.state.unfinished:
            with self.enter():
                pass

    def read(self, req_id: Hashable, of_row: Callable[[int], T]) -> T:
        """What ``of_row`` reads of the request's row; ConcurrentUseError where another thread is inside the batch, and
        for a signal's handler while rows move: they would be another request's numbers. It is read again where a whole
        call came in between, of another thread or a handler: what was read before and after does not go together.
        """
        self.settle()
        order, state = self.order, self.state
        for _ in range(READS):
            entered = state.entered  # first: who comes in from here on is noticed at the end
            state.check_reader()
            read = of_row(order.row(req_id))
            state.check_reader()
            if state.entered == entered and not (self.moving and state.busy):
                return read
        raise ConcurrentUseError("batch: it changes while it is read; read it before or after the call")

    def num_computed(self, row: int) -> int:
        return self.state.progress(row)[0]  # type: ignore[no-any-return]

    def encoder_len(self, row: int) -> int:
        return self.state.progress(row)[1]  # type: ignore[no-any-return]

    def num_encoded(self, row: int) -> int:
        """Encoder tokens of the row that are in the cache: all of them, or none."""
        _, encoder_len, encoder_done = self.state.progress(row)
        return encoder_len if encoder_done else 0

    def rows_without_block(self, table: BlockTable) -> list[int]:
        """Rows whose next token has no block in ``table``."""
        count = table.state.needs_block(len(self.order), self._scratch)
        return self._scratch[:count].tolist()  # type: ignore[no-any-return]

    def add(self, req_id: Hashable, row: int) -> None:
        """Puts the request into ``row``, whose tables are filled already."""
        self.undo.append((self._put, row, None, False))
        self.order.add(req_id, row)
        self.added_at[self.lengths[codes.PLACE, row]] = self.state.changes
        for column in self.columns.values():
            column.clear(row)
        self._count_rows()
        self.state.dirty = True

    def vacate(self, row: int) -> None:
        """Takes back the filling of a row for a request that was not added to it."""
        for table in self.tables.values():
            table.clear(row)
        for slots in self.states.values():
            slots.hold(row, [])
        self.state.start(row, 0, 0, False)

    def holders(self) -> dict[str, Any]:
        """What knows the blocks, or the slot, that each row holds, by group name."""
        return {**self.tables, **self.states}

    def held(self, row: int) -> dict[str, list[int]]:
        """The manager blocks that the row holds, and its slots of states, by group name."""
        return {name: holder.held(row) for name, holder in self.holders().items()}

    def clear(self, row: int, *, keeps_encoder: bool = False) -> dict[str, list[int]]:
        """Clears the row's blocks and progress; returns the blocks by group name. A roll-back refills the row."""
        held = self.held(row)
        progress = self.state.progress(row)
        self.undo.append((self._refill, row, self.order.req_ids[row], row in self.order.paused, progress, held))
        if self.overlap is not None:
            self.undo.append((self.overlap.restore, *self.overlap.steps))
            self.overlap.leave(self.order.req_ids[row])
        if self.ahead is not None:
            self.ahead.leave(self.order.req_ids[row])
        for table in self.tables.values():
            table.clear(row)
        for slots in self.states.values():
            slots.hold(row, [])
        self.state.start(row, 0, progress[1] if keeps_encoder else 0, False)
        self.state.dirty = True
        return held

    def remove(self, req_id: Hashable) -> dict[str, list[int]]:
        """Removes the request; returns the blocks that it held, by group name."""
        row = self.order.row(req_id)
        held = self.clear(row)
        if self.spans is not None:
            self.spans.put(row, NONE)
        self.order.remove(req_id, row)
        self._count_rows()
        self.count_change()
        return held

    def _refill(
        self, row: int, req_id: Hashable, paused: bool, progress: tuple[int, int, bool], held: dict[str, list[int]]
    ) -> None:
        """Takes back what ``clear`` and ``remove`` have done."""
        for name, table in self.tables.items():
            table.refill(row, held[name])
        for name, slots in self.states.items():
            slots.hold(row, held[name])
        self.state.start(row, *progress)
        self._put(row, req_id, paused)

    def _put(self, row: int, req_id: Hashable | None, paused: bool) -> None:
        self.order.put(row, req_id, paused=paused)
        self._count_rows()
        self.state.dirty = True

    def swap(self, i: int, j: int) -> None:
        """Exchanges two rows, outside of a build."""
        moves = ((i, j),)
        self.start_moving()
        self.state.swap(moves)
        self.take_moves(moves)
        self.state.dirty = True
        self.count_change()

    def start_moving(self) -> None:
        """Notes that rows move, until ``take_moves`` has followed or a roll-back is over."""
        self.undo.append((setattr, self, "moving", False))
        self.moving = True

    def take_moves(self, moves: Moves) -> None:
        """Follows the swaps that the kernels made in the order of rows; a roll-back brings back the order before."""
        order = self.order
        if moves or (order.req_ids and order.req_ids[-1] is None):
            self.undo.append((self._reorder, order.req_ids.copy(), order.paused.copy()))
            if moves:  # a roll-back exchanges the rows themselves behind that
                self.undo.append((setattr, self, "moving", True))
            order.exchange(moves)
            order.drop_last_holes()
            self._count_rows()
        self.moving = False

    def move_back(self, moves: Moves) -> list[tuple[Any, ...]]:
        """What takes back these swaps of the last step, in tables and order, for ``undo``."""
        before, num_rows = RequestRows(), 1 + max((max(move) for move in moves), default=-1)
        before.req_ids = [*self.order.req_ids, *[None] * (num_rows - len(self.order))]
        before.paused = self.order.paused.copy()
        before.exchange(reversed(moves))
        undo = [(self._reorder, before.req_ids, before.paused), self.state.swap_back(moves)]
        counted, earlier = self._moved
        if moves and self.state.changes == counted:  # nothing else has changed since that step
            undo.append((self._set_changes, earlier))
        return undo

    def _reorder(self, req_ids: list[Any], paused: set[int]) -> None:
        self.order.req_ids, self.order.paused = req_ids, paused
        self.order.derive()
        self._count_rows()
        self.state.dirty = True

    def set_step_rows(self, num_reqs: int, moved: bool) -> None:
        """Makes the first ``num_reqs`` rows those of the step that is being built."""
        self.state.req_ids = tuple(self.order.req_ids[:num_reqs])
        # Until a request joins, leaves or is preempted, the next step of all requests has the same rows.
        self.state.dirty = num_reqs != len(self.order)
        if moved:
            self.count_moves()

    def count_moves(self) -> None:
        """Notes that a step moves rows; ``move_back`` knows it again."""
        earlier = self.state.changes
        self.count_change()
        self._moved = self.state.changes, earlier

    def count_change(self, changed: bool = True) -> None:
        """Notes that blocks of rows change place or go away. A roll-back, after which they are where they were, brings
        the number before back; one that it takes back is not given again.
        """
        if not changed:
            return
        self.undo.append((self._set_changes, self.state.changes))
        self._num_changes += 1
        self.state.changes = self._num_changes

    @property
    def tokens_ahead(self) -> int:
        """Tokens of a request that steps ahead count as computed and ``stop`` may take back."""
        return 0 if self.ahead is None else max(self.ahead.left, 0)

    def places(self, rows: Any) -> npt.NDArray[np.intp]:
        """The places of the requests in ``rows``, an index or a slice, to index arrays by place with.

        Of the dtype of indices: NumPy casts another one in a buffer, and crashes where it gets no memory for that.
        """
        places: npt.NDArray[np.intp] = self.lengths[codes.PLACE, rows].astype(np.intp)
        return places

    def came_later(self, places: Any, metadata: Any) -> Any:
        """bool: of each of ``places``, whether its request was added since the step was built, perhaps by the name of
        one that ran in it.
        """
        return self.added_at[places] > metadata._arena.changes

    def _set_changes(self, number: int) -> None:
        """Brings a number before back; requests that came since count from there, as if it had stood."""
        np.minimum(self.added_at, number, out=self.added_at)
        self.state.changes = number

    def _count_rows(self) -> None:
        self.state.set_num_rows(len(self.order))
