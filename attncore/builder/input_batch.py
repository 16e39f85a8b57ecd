"""The requests in flight: their blocks and lengths, kept from step to step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import slots
from attncore.errors import ConcurrentUseError

NULL_BLOCK_ID = 0


class _Entered:
    """``with`` it: the batch is one caller's. A plain class, since a generator's would cost a build a microsecond."""

    def __init__(self, rows: Any) -> None:
        self._enter, self._leave = rows.enter, rows.leave

    def __enter__(self) -> None:
        if not self._enter():
            raise ConcurrentUseError("batch: another thread is inside it or its builder; one at a time")

    def __exit__(self, *_: object) -> None:
        self._leave()


class InputBatch:
    """Up to ``max_num_reqs`` requests of up to ``max_model_len`` tokens, in blocks of ``block_size`` tokens.

    Capacity and memory (``nbytes``, host) are fixed here. ``num_blocks`` bounds the block ids (the cache's size;
    default: any int32). Block 0 is the null block: a table may hold it where a window has passed, no token may be
    written to it. A request keeps its row until a build moves it (``metadata.moves``). One thread at a time.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int | None = None,
        kernels: slots.KernelsName | None = None,
    ) -> None:
        sizes = {"max_num_reqs": max_num_reqs, "max_model_len": max_model_len, "block_size": block_size}
        if num_blocks is not None:
            sizes["num_blocks"] = num_blocks
        for name, value in sizes.items():
            slots._integer(name, value, 1)
        width = -(-max_model_len // block_size)
        if width * block_size > slots.INT32_MAX:
            raise ValueError(f"max_model_len: {max_model_len} in blocks of {block_size} does not fit int32")
        if max_num_reqs * width > slots.INT32_MAX:
            raise ValueError(f"max_num_reqs: {max_num_reqs} rows of {width} blocks do not fit int32")
        self.max_num_reqs, self.max_model_len, self.block_size = max_num_reqs, max_model_len, block_size
        self.kernels = slots.load_kernels(kernels)
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_num_reqs, width), np.int32)
        self._limit = slots.INT32_MAX + 1 if num_blocks is None else num_blocks
        self._state = np.zeros((4, max_num_reqs), np.int32)  # num_computed, num_blocks, and the kernels' own two
        self._state[2] = -1  # no block cached, as in a row that was cleared
        self._scratch = np.zeros(max_num_reqs, np.int32)
        self._rows = self.kernels.BlockRows(self._state, self._scratch, self.block_table, block_size, self._limit)
        self._entered = _Entered(self._rows)
        self._ids: list[Any] = []  # by row; None: an empty row
        self._row_of: dict[Hashable, int] = {}
        self._holes: set[int] = set()
        self._paused: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Host memory of the table and the rows, bytes."""
        return int(self.block_table.nbytes + self._state.nbytes + self._scratch.nbytes)

    @property
    def num_reqs(self) -> int:
        return len(self._row_of)

    @property
    def num_rows(self) -> int:
        """The high-water mark of rows in use; rows of removed requests below it are filled by the next build."""
        return len(self._ids)

    @property
    def req_ids(self) -> tuple[Hashable, ...]:
        """Every request, in the order of rows."""
        return tuple(req_id for req_id in self._ids if req_id is not None)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def num_computed_tokens(self, req_id: Hashable) -> int:
        """Tokens of the request that are in the cache."""
        return self._computed_of(self._row(req_id))

    def block_ids(self, req_id: Hashable) -> list[int]:
        """The blocks that the request holds, in order."""
        row = self._row(req_id)
        ids: list[int] = self.block_table[row, : self._num_blocks_of(row)].tolist()
        return ids

    def add_request(self, req_id: Hashable, block_ids: Any, num_computed_tokens: int = 0) -> int:
        """A request joins; ``num_computed_tokens`` of its tokens are in ``block_ids`` already.

        Answers the row it has until a build moves it. Raises ValueError, and changes nothing, where the batch is full,
        the name is taken, a block id is bad or the blocks do not hold the computed tokens.
        """
        with self._entered:
            if req_id is None:
                raise ValueError("req_id: None cannot name a request")
            try:
                hash(req_id)
            except TypeError as error:
                raise TypeError(f"req_id: {req_id!r} cannot name a request ({error})") from None
            if req_id in self._row_of:
                raise ValueError(f"req_id: {req_id!r} is in the batch already; remove it first")
            slots._integer("num_computed_tokens", num_computed_tokens, 0)
            if num_computed_tokens > self.max_model_len:
                raise ValueError(
                    f"num_computed_tokens: {num_computed_tokens} of request {req_id!r} exceed "
                    f"max_model_len {self.max_model_len}"
                )
            if len(self._row_of) == self.max_num_reqs:
                raise ValueError(f"req_id: no row for {req_id!r}; the batch holds max_num_reqs {self.max_num_reqs}")
            row = min(self._holes) if self._holes else len(self._ids)
            self._rows.start(row, num_computed_tokens)
            try:
                self._append(row, req_id, block_ids)
                held = self._num_blocks_of(row)
                if held * self.block_size < num_computed_tokens:
                    raise ValueError(
                        f"block_ids: request {req_id!r} has {num_computed_tokens} computed tokens but holds "
                        f"{held} blocks (block_size {self.block_size})"
                    )
            except BaseException:
                self._clear(row)
                raise
            if row == len(self._ids):
                self._ids.append(req_id)
                self._rows.num_rows = len(self._ids)
            else:
                self._holes.discard(row)
                self._ids[row] = req_id
            self._row_of[req_id] = row
            self._rows.dirty = True
            return row

    def append_blocks(self, req_id: Hashable, block_ids: Any) -> None:
        """The request gets more blocks; one that was preempted takes part again."""
        self.append_blocks_many({req_id: block_ids})

    def append_blocks_many(self, block_ids: Mapping[Any, Any]) -> None:
        """Blocks for several requests in one call: all of them, or, where one is wrong, none."""
        if not isinstance(block_ids, Mapping):
            raise TypeError(f"block_ids: {block_ids!r} is not a mapping of request to block ids")
        with self._entered:
            done: list[tuple[int, int]] = []
            try:
                for req_id, ids in block_ids.items():
                    row = self._row(req_id)
                    held = self._num_blocks_of(row)
                    self._append(row, req_id, ids)
                    done.append((row, held))
            except BaseException:
                for row, held in reversed(done):
                    self._rows.truncate(row, held)
                raise
            for row, _ in done:
                if row in self._paused and self._num_blocks_of(row):
                    self._paused.discard(row)
                    self._rows.dirty = True

    def truncate_blocks(self, req_id: Hashable, num_blocks: int) -> list[int]:
        """Keeps the request's first ``num_blocks`` blocks, which must hold its computed tokens; those given up."""
        with self._entered:
            row = self._row(req_id)
            slots._integer("num_blocks", num_blocks, 0)
            held, needed = self._num_blocks_of(row), -(-self._computed_of(row) // self.block_size)
            if not needed <= num_blocks <= held:
                raise ValueError(
                    f"num_blocks: {num_blocks} is outside {needed}..{held} "
                    f"(request {req_id!r} has {self._computed_of(row)} computed tokens and {held} blocks)"
                )
            given_up: list[int] = self.block_table[row, num_blocks:held].tolist()
            self._rows.truncate(row, num_blocks)
            self._rows.changes += 1
            return given_up

    def remove_request(self, req_id: Hashable) -> list[int]:
        """The request leaves, between any two steps; the blocks it held. Its row stays empty until a build."""
        with self._entered:
            row = self._row(req_id)
            held = self._clear(row)
            del self._row_of[req_id]
            self._ids[row] = None
            self._holes.add(row)
            self._paused.discard(row)
            self._drop_last_holes()
            self._rows.dirty = True
            return held

    def preempt(self, req_id: Hashable) -> list[int]:
        """The request loses its blocks and its progress, to be computed again; the blocks it held.

        It keeps its row and sits out until ``append_blocks`` gives it blocks.
        """
        with self._entered:
            row = self._row(req_id)
            held = self._clear(row)
            self._paused.add(row)
            self._rows.dirty = True
            return held

    def rollback(self, req_id: Hashable, num_tokens: int) -> None:
        """Takes back the request's last ``num_tokens`` computed tokens (rejected drafts); its blocks stay."""
        with self._entered:
            row = self._row(req_id)
            slots._integer("num_tokens", num_tokens, 0)
            computed = self._computed_of(row)
            if num_tokens > computed:
                raise ValueError(
                    f"num_tokens: {num_tokens} goes past the start of request {req_id!r}, "
                    f"which has {computed} computed tokens"
                )
            self._rows.set_computed(row, computed - num_tokens)

    def needs_block(self) -> list[Hashable]:
        """Requests whose next token has no block yet, in the order of rows; not those preempted."""
        with self._entered:
            count = self._rows.needs_block(self._scratch)
            rows = self._scratch[:count].tolist()
            return [self._ids[row] for row in rows if row not in self._paused and row not in self._holes]

    # What builders and error texts need; by row.

    def _req_id_of(self, row: int) -> Hashable:
        return self._ids[row]  # type: ignore[no-any-return]

    def _computed_of(self, row: int) -> int:
        return int(self._state[0, row])

    def _num_blocks_of(self, row: int) -> int:
        return int(self._state[1, row])

    def _page_indices(self, indptr: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The first ``indptr[i + 1] - indptr[i]`` blocks of rows 0, 1, ... in turn: int32[indptr[-1]], fresh."""
        indices = np.empty(int(indptr[-1]), np.int32)
        self.kernels.fill_page_indices(self.block_table, indptr, indices)
        return indices

    def _row(self, req_id: Hashable) -> int:
        try:
            return self._row_of[req_id]
        except KeyError:
            raise ValueError(f"req_id: {req_id!r} is not in the batch") from None
        except TypeError as error:
            raise TypeError(f"req_id: {req_id!r} cannot name a request ({error})") from None

    def _append(self, row: int, req_id: Hashable, block_ids: Any) -> None:
        if self._rows.append(row, block_ids) < 0:
            room = self.block_table.shape[1] - self._num_blocks_of(row)
            kind, text = slots._bad_ids(block_ids, self._limit) or (
                ValueError,
                f"{len(block_ids)} block ids but room for {room} (max_model_len {self.max_model_len}, "
                f"block_size {self.block_size})",
            )
            raise kind(f"block_ids: request {req_id!r}: {text}")

    def _clear(self, row: int) -> list[int]:
        held: list[int] = self.block_table[row, : self._num_blocks_of(row)].tolist()
        self._rows.truncate(row, 0)
        self._rows.start(row, 0)
        self._rows.changes += 1
        return held

    def _drop_last_holes(self) -> None:
        while self._ids and self._ids[-1] is None:
            self._ids.pop()
            self._holes.discard(len(self._ids))
        self._rows.num_rows = len(self._ids)

    # What a build does to the order of rows.

    def _take_moves(self, moves: Iterable[tuple[int, int]]) -> None:
        self._exchange(moves)
        self._drop_last_holes()

    def _take_back(self, moves: tuple[tuple[int, int], ...], num_rows: int) -> None:
        """Undoes ``_take_moves`` of a batch that had ``num_rows`` rows."""
        self._holes.update(range(len(self._ids), num_rows))
        self._ids.extend([None] * (num_rows - len(self._ids)))
        self._exchange(reversed(moves))
        self._rows.num_rows = num_rows
        self._rows.dirty = True

    def _exchange(self, moves: Iterable[tuple[int, int]]) -> None:
        ids = self._ids
        for i, j in moves:
            ids[i], ids[j] = ids[j], ids[i]
            for rows in (self._holes, self._paused):
                if (i in rows) != (j in rows):
                    rows.symmetric_difference_update((i, j))
            for row in (i, j):
                if ids[row] is not None:
                    self._row_of[ids[row]] = row
