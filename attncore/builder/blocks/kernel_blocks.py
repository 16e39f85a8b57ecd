"""Manager blocks, expanded to the smaller blocks that a kernel uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attncore import arguments, array_arguments
from attncore.arguments import INT32_MAX
from attncore.array_arguments import Int32Array
from attncore.show import counted


def kernel_blocks_per_block(manager_block_size: int, kernel_block_size: int) -> int:
    """The number of kernel blocks in a manager block; both sizes are in tokens."""
    manager_block_size = arguments.integer("manager_block_size", manager_block_size, 1)
    kernel_block_size = arguments.integer("kernel_block_size", kernel_block_size, 1)
    if manager_block_size % kernel_block_size:
        raise ValueError(
            f"kernel_block_size: {kernel_block_size} does not divide the manager's block size "
            f"{manager_block_size}; choose a block size that is a multiple of the kernel's"
        )
    return manager_block_size // kernel_block_size


def expand_blocks(
    block_ids: npt.ArrayLike, kernel_blocks: int, *, num_blocks: npt.ArrayLike | None = None
) -> Int32Array:
    """Ids of manager blocks, int[..., width], as ids of kernel blocks, int32[..., width * kernel_blocks].

    Block b becomes ``b * kernel_blocks`` and the ids after it: [0, 2] with 4 kernel blocks each is
    [0, 1, 2, 3, 8, 9, 10, 11]. Slots do not change. With ``num_blocks`` int[n], the blocks that each row of a rectangle
    (n, width) holds, the rest of a row is padded with 0; without it, padding is expanded like block 0. Host arrays.
    """
    kernel_blocks = arguments.integer("kernel_blocks", kernel_blocks, 1)
    ids = array_arguments.as_array("block_ids", block_ids)
    if ids.ndim not in (1, 2) or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"block_ids: {ids.dtype}{list(ids.shape)}; it must be a row or a rectangle of integers")
    array_arguments.at_most("kernel_blocks", ids.size * kernel_blocks, array_arguments.MOST_BLOCKS, "ids in all")
    held = None if num_blocks is None else _check_num_blocks(num_blocks, ids)
    if not ids.size:
        return np.empty((*ids.shape[:-1], ids.shape[-1] * kernel_blocks), np.int32)
    array_arguments.check_block_ids_fit("block_ids", ids)
    highest = int(ids.max())
    if (highest + 1) * kernel_blocks - 1 > INT32_MAX:
        raise ValueError(f"block_ids: block {highest} of {counted(kernel_blocks, 'kernel block')} does not fit int32")
    first = ids.astype(np.int32, copy=False) * np.int32(kernel_blocks)
    expanded = np.empty((*ids.shape, kernel_blocks), np.int32)
    if kernel_blocks > 8:
        np.add(first[..., np.newaxis], np.arange(kernel_blocks, dtype=np.int32), out=expanded)
    else:
        for index in range(kernel_blocks):  # few long loops instead of many short ones
            np.add(first, np.int32(index), out=expanded[..., index])
    expanded = expanded.reshape(*ids.shape[:-1], ids.shape[-1] * kernel_blocks)
    if held is not None:
        expanded[np.arange(expanded.shape[1]) >= held[:, np.newaxis] * kernel_blocks] = 0
    return expanded


def _check_num_blocks(num_blocks: npt.ArrayLike, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    if ids.ndim != 2:
        raise ValueError("num_blocks: given for a single row; cut the row instead")
    held = array_arguments.lengths("num_blocks", num_blocks, 0)
    if len(held) != len(ids):
        raise ValueError(
            f"num_blocks: {counted(len(held), 'count')} for {counted(len(ids), 'row')} of block_ids; give one each"
        )
    if held.size and held.max() > ids.shape[1]:
        row = int(held.argmax())
        raise ValueError(
            f"num_blocks: row {row} holds {counted(held[row], 'block')}, but block_ids has "
            f"{counted(ids.shape[1], 'column')}"
        )
    return held.astype(np.int64)
