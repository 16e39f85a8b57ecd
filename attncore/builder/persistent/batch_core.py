"""The state that an InputBatch shares with the builder over it: tables, lengths by row, the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.builder.persistent.block_table import BlockTable
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.builder.persistent.request_rows import RequestRows
from attncore.errors import ConcurrentUseError
from attncore.kernels import KernelsName, codes, load_kernels


class _Entered:
    """A context manager in which one caller has the batch to itself; ConcurrentUseError for a second one.

    A plain class: ``contextlib.contextmanager`` would cost each build a microsecond.
    """

    def __init__(self, state: Any) -> None:
        self._enter, self._leave = state.enter, state.leave

    def __enter__(self) -> None:
        if not self._enter():
            raise ConcurrentUseError("batch: another thread is inside it or its builder; one at a time")

    def __exit__(self, *_: object) -> None:
        self._leave()


class BatchCore:
    """The block tables by group name (decoder groups first), the kernels' BatchState and the order of rows."""

    def __init__(
        self,
        groups: tuple[KVCacheGroup, ...],
        max_num_reqs: int,
        max_model_len: int,
        max_encoder_len: int,
        kernels: KernelsName | None,
    ) -> None:
        self.groups, self.max_num_reqs = groups, max_num_reqs
        self.max_model_len, self.max_encoder_len = max_model_len, max_encoder_len
        self.kernels = load_kernels(kernels)
        self.tables = {
            group.name: BlockTable(group, max_num_reqs, max_encoder_len if group.cross else max_model_len, self.kernels)
            for group in groups
        }
        tables = list(self.tables.values())
        has_cross = groups[-1].cross
        self.decoders = tables[:-1] if has_cross else tables
        self.cross: BlockTable | None = tables[-1] if has_cross else None
        self.lengths: npt.NDArray[np.int32] = np.zeros((3, max_num_reqs), np.int32)
        """By row: ``codes.COMPUTED``, ``ENCODER_LENS``, ``ENCODER_DONE``."""
        self.state = self.kernels.BatchState(
            self.lengths, [table.state for table in self.decoders], self.cross.state if self.cross else None
        )
        self.state.max_encoder_len = max_encoder_len
        self.entered = _Entered(self.state)
        self.order = RequestRows()
        self.follower: Callable[[], Any] | None = None
        """A weak reference to the builder whose device tables are kept in step with these."""
        self._scratch = np.zeros(max_num_reqs, np.int32)

    @property
    def nbytes(self) -> int:
        """Host memory of tables and lengths, bytes."""
        return int(sum(table.nbytes for table in self.tables.values()) + self.lengths.nbytes + self._scratch.nbytes)

    def num_computed(self, row: int) -> int:
        return int(self.lengths[codes.COMPUTED, row])

    def encoder_len(self, row: int) -> int:
        return int(self.lengths[codes.ENCODER_LENS, row])

    def num_encoded(self, row: int) -> int:
        """Encoder tokens of the row that are in the cache: all of them, or none."""
        return self.encoder_len(row) * int(self.lengths[codes.ENCODER_DONE, row])

    def rows_without_block(self, table: BlockTable) -> list[int]:
        """Rows whose next token has no block in ``table``."""
        count = table.state.needs_block(len(self.order), self._scratch)
        return self._scratch[:count].tolist()  # type: ignore[no-any-return]

    def clear(self, row: int) -> dict[str, list[int]]:
        """Clears the row's blocks and progress; returns the blocks by group name."""
        held = {name: table.clear(row) for name, table in self.tables.items()}
        self.state.start(row, 0, 0, False)
        self.state.changes += 1
        return held

    def add(self, req_id: Hashable, row: int) -> None:
        """Puts the request into ``row``, whose tables are filled already."""
        self.order.add(req_id, row)
        self._count_rows()
        self.state.dirty = True

    def remove(self, req_id: Hashable) -> dict[str, list[int]]:
        """Removes the request; returns the blocks that it held, by group name."""
        held = self.clear(self.order.row(req_id))
        self.order.remove(req_id)
        self._count_rows()
        self.state.dirty = True
        return held

    def swap(self, i: int, j: int) -> None:
        """Exchanges two rows, outside of a build."""
        self.state.swap(i, j)
        self.take_moves([(i, j)])
        self.state.dirty = True
        self.state.changes += 1

    def take_moves(self, moves: Iterable[tuple[int, int]]) -> None:
        """Follows the swaps that the kernels made in the order of rows."""
        self.order.exchange(moves)
        self.order.drop_last_holes()
        self._count_rows()

    def take_back(self, moves: tuple[tuple[int, int], ...], num_rows: int) -> None:
        """Undoes ``take_moves``; ``num_rows`` is the number of rows before it."""
        self.order.restore(num_rows)
        self.order.exchange(reversed(moves))
        self._count_rows()
        self.state.dirty = True

    def set_step_rows(self, num_reqs: int, moved: bool) -> None:
        """Makes the first ``num_reqs`` rows those of the step that is being built."""
        self.state.req_ids = tuple(self.order.req_ids[:num_reqs])
        # Until a request joins, leaves or is preempted, the next step of all requests has the same rows.
        self.state.dirty = num_reqs != len(self.order)
        self.state.changes += moved

    def _count_rows(self) -> None:
        self.state.num_rows = len(self.order)
