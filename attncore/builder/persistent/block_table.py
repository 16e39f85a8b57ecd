"""The block table of one KV-cache group on the host: the blocks that each row holds."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX
from attncore.builder.device.memory import zeros
from attncore.builder.persistent.kv_cache_group import KVCacheGroup
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted


class BlockTable:
    """``array`` int32[max_num_reqs, width]: the kernel blocks of each row, padded with 0.

    ``state`` is the kernels' TableState over it.
    """

    def __init__(self, group: KVCacheGroup, max_num_reqs: int, max_len: int, kernels: Any) -> None:
        self.group, self.kernels = group, kernels
        per_block = group.kernel_blocks
        width = -(-max_len // group.block_size) * per_block
        name = "max_encoder_len" if group.cross else "max_model_len"
        if width * group.tokens_per_column > INT32_MAX:
            raise ValueError(f"{name}: {max_len} in blocks of {group.block_size} does not fit int32")
        if max_num_reqs * width > INT32_MAX:
            raise ValueError(
                f"max_num_reqs: {counted(max_num_reqs, 'row')} of {counted(width, 'block')} do not fit int32; lower "
                f"it or {name}"
            )
        most = (INT32_MAX + 1) // per_block
        if group.num_blocks is not None and group.num_blocks > most:
            raise ValueError(
                f"num_blocks: {group.num_blocks} of {counted(per_block, 'kernel block')} each do not fit int32"
            )
        self.max_len, self.limit = max_len, most if group.num_blocks is None else group.num_blocks
        self.array: npt.NDArray[np.int32] = zeros((max_num_reqs, width), np.int32)
        self._lengths = zeros((4, max_num_reqs), np.int32)
        self._lengths[codes.CACHED_COLUMN] = -1  # no block is cached, as in a cleared row
        self._scratch = zeros(max_num_reqs, np.int32)
        self.state = kernels.TableState(
            self._lengths, self._scratch, self.array, group.tokens_per_column, self.limit, per_block
        )

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes + self._lengths.nbytes + self._scratch.nbytes)

    @property
    def synced(self) -> npt.NDArray[np.int32]:
        """int32[max_num_reqs]: leading columns of each row that the device's table has already."""
        return self._lengths[codes.SYNCED]  # type: ignore[no-any-return]

    def num_columns(self, row: int) -> int:
        """The number of kernel blocks that the row holds."""
        return self.state.num_columns(row)  # type: ignore[no-any-return]

    def num_held(self, num_rows: int) -> int:
        """The number of manager blocks that the first rows hold together."""
        return int(self._lengths[codes.NUM_BLOCKS, :num_rows].sum()) // self.group.kernel_blocks

    def held(self, row: int) -> list[int]:
        """The manager blocks that the row holds, in order."""
        per_block = self.group.kernel_blocks
        columns = self.array[row, : self.num_columns(row) : per_block]
        ids: list[int] = (columns // per_block if per_block > 1 else columns).tolist()
        return ids

    def append(self, row: int, req_id: Hashable, block_ids: Any, passed: int = 0) -> None:
        """Appends manager blocks; raises ValueError or TypeError, and changes nothing, for a bad id, a full row, or a
        block that cannot stand there: block 0 may before column ``passed``, any other once.
        """
        if self.state.append(row, block_ids, passed) < 0:
            room = (self.array.shape[1] - self.num_columns(row)) // self.group.kernel_blocks
            error, text = array_arguments.bad_block_ids(block_ids, self.limit, room) or (
                ValueError,
                f"{counted(len(block_ids), 'block id')} but room for {room} "
                f"({'max_encoder_len' if self.group.cross else 'max_model_len'} {self.max_len}, "
                f"block_size {self.group.block_size})"
                if len(block_ids) > room
                else self._why_unfit(row, list(map(int, block_ids)), passed // self.group.kernel_blocks),
            )
            raise error(f"block_ids: request {quoted(req_id)}: {text}")

    def passed_columns(self, num_computed: int, window_known: bool) -> int:
        """The leading columns of a row of ``num_computed`` tokens in which the null block may stand: a window has
        passed them or, where the group's layers may have one that it does not state, they are written already.
        """
        seen = self.first_seen(num_computed) if window_known else num_computed
        return seen // self.group.block_size * self.group.kernel_blocks

    def _why_unfit(self, row: int, given: list[int], passed: int) -> str:
        """Why one of the given manager blocks cannot stand in the row; before index ``passed`` the null block can."""
        blocks = self.held(row)
        for index, block in enumerate(given, len(blocks)):
            if block == 0 and index >= passed:
                return (
                    f"block 0 at index {index}, the null block, where no window has passed; give a block of its own to "
                    f"tokens {index * self.group.block_size} and on, which are written to it or read"
                )
            if block and block in blocks:
                return (
                    f"block {block} stands at index {blocks.index(block)} and again at {index}; give each place its own"
                )
            blocks.append(block)
        return "its block ids changed while they were read"

    def check_holds(self, row: int, req_id: Hashable, num_tokens: int) -> None:
        """ValueError where the row's blocks do not hold ``num_tokens`` tokens."""
        held = self.num_columns(row)
        if held * self.group.tokens_per_column < num_tokens:
            what = "encoder token" if self.group.cross else "computed token"
            holds = counted(held // self.group.kernel_blocks, "block")
            needed = -(-num_tokens // (self.group.tokens_per_column * self.group.kernel_blocks))
            raise ValueError(
                f"block_ids: request {quoted(req_id)} has {counted(num_tokens, what)} but holds {holds} "
                f"(block_size {self.group.block_size}); give it {needed}"
            )

    def clear(self, row: int) -> None:
        """Removes all blocks of the row."""
        self.state.truncate(row, 0)
        self.state.start(row)

    def refill(self, row: int, held: list[int]) -> None:
        """Makes the row hold these manager blocks, which it held before."""
        self.clear(row)
        self.state.append(row, held, -1)

    def replaces(self, row: int, req_id: Hashable, index: Any, block_id: Any, passed: int) -> tuple[int, int, int]:
        """``index`` and ``block_id`` as ints, and the manager block that the row has at ``index``.

        ValueError or TypeError where it cannot be replaced: block 0 may stand before column ``passed`` only, any other
        once.
        """
        index = arguments.integer("index", index, 0)
        block_id = arguments.integer("block_id", block_id, 0)
        held = self.held(row)
        if index >= len(held):
            raise ValueError(f"index: {index}, but request {quoted(req_id)} holds {counted(len(held), 'block')}")
        if block_id >= self.limit:
            raise ValueError(f"block_id: {block_id} is outside 0..{self.limit - 1}")
        if block_id == 0 and index * self.group.kernel_blocks >= passed:
            raise ValueError(
                f"block_id: 0, the null block, but no window of request {quoted(req_id)} has passed block {index}: its "
                "tokens are written to it or read"
            )
        if block_id and block_id != held[index] and block_id in held:
            raise ValueError(
                f"block_id: {block_id} stands at index {held.index(block_id)} of request {quoted(req_id)} already; "
                f"give index {index} a block of its own"
            )
        return index, block_id, held[index]

    def put(self, row: int, index: int, block_id: int) -> None:
        """Makes ``block_id`` the row's manager block number ``index``."""
        per_block = self.group.kernel_blocks
        for extra in range(per_block):
            self.state.replace(row, index * per_block + extra, block_id * per_block + extra)

    def first_seen(self, num_computed: int) -> int:
        """The first token that the next query of a request with ``num_computed`` tokens sees in the group's window."""
        return max(0, num_computed + 1 - (self.group.sliding_window or num_computed + 1))

    def pass_windows(self, num_rows: int, num_rollback: int, released: list[tuple[int, int, list[int]]]) -> None:
        """Releases the blocks before what the next queries see.

        Adds to ``released``, for each row that has any: the row, the index of the first, and manager block ids.
        """
        if self.group.sliding_window is not None:
            self.state.pass_windows(num_rows, self.group.sliding_window, num_rollback, released)

    def take_back_passed(self, released: list[tuple[int, int, list[int]]]) -> None:
        """The inverse of ``pass_windows``."""
        for row, first, block_ids in released:
            for index, block_id in enumerate(block_ids, first):
                self.put(row, index, block_id)

    def check_sees(self, row: int, req_id: Hashable, num_computed: int, argument: str = "num_tokens") -> None:
        """ValueError where a request rolled back to ``num_computed`` tokens would see released blocks."""
        index, per_block = self.first_seen(num_computed) // self.group.block_size, self.group.kernel_blocks
        # Any of them may be null, not only the first: replace_block and add_request put null blocks where they like.
        seen = self.array[row, index * per_block : self.num_columns(row) : per_block]
        for extra in np.flatnonzero(seen < per_block)[:1].tolist():
            raise ValueError(
                f"{argument}: request {quoted(req_id)} rolled back to {counted(num_computed, 'token')} would see block "
                f"{index + extra} of group {self.group.name!r}, which its window has passed; release with num_rollback"
            )

    def page_indices(self, indptr: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The first ``indptr[i + 1] - indptr[i]`` blocks of each row i, concatenated: a new int32[indptr[-1]]."""
        # Who writes to metadata gets an error, not memory that nothing has filled: with a first entry of 0, all of
        # ``indices`` is filled, or the kernel names a row that descends, is too wide or does not fit.
        num_pages = min(max(int(indptr[-1]), 0), self.array.size)
        indices = np.empty(num_pages, np.int32)
        row = self.kernels.fill_page_indices(self.array, indptr, indices) if indptr[0] == 0 else 0
        if row >= 0:
            raise ValueError(f"paged_kv_indptr: row {row} was changed since the build; metadata is read-only")
        return indices
