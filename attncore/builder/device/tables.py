"""Block tables on a device: a journal of new columns keeps them equal to the batch's; page indices come from them.

Equal up to each row's last block: behind it the batch's are 0, and a device's keep what stood there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from attncore.builder.device.memory import device_zeros
from attncore.show import counted

SURPLUS_ENTRIES = 1 << 16
"""Journal entries per copy of the surplus that an arena has no room for."""


class TableGroup(Protocol):
    """What a device table reads of its KV-cache group."""

    @property
    def cross(self) -> bool: ...
    @property
    def tokens_per_column(self) -> int: ...


class HostTable(Protocol):
    """The batch's table on the host: int32[rows, width], and the kernels' TableState, which writes the journal."""

    array: npt.NDArray[np.int32]
    state: Any
    kernels: Any

    @property
    def group(self) -> TableGroup: ...
    @property
    def synced(self) -> npt.NDArray[np.int32]: ...


class DeviceTables:
    """A table int32[rows, width] on ``device`` for each table of the batch, with a fixed stride and address."""

    def __init__(self, device: str, host: Sequence[HostTable]) -> None:
        self.device, self.host = device, list(host)
        self._cuda = device.startswith("cuda")
        self.tensors = [device_zeros(table.array.shape, torch.int32, device) for table in host]
        self._page_indices: list[Any] = [None] * len(self.tensors)
        self._kernels: Any = None
        if self._cuda:
            from attncore.builder.device import triton_kernels

            self._kernels = triton_kernels

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Device memory of tables and page indices, bytes."""
        tensors = [*self.tensors, *(buffer for buffer in self._page_indices if buffer is not None)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def apply(self, index: int, entries: Any) -> None:
        """Writes journal entries int64 (flat index in the low half, block id in the high half) to table ``index``."""
        table = self.tensors[index]
        if self._kernels is not None:
            self._kernels.apply_journal(table, entries)
            return
        table.view(-1).index_copy_(0, entries & 0xFFFFFFFF, (entries >> 32).to(torch.int32))

    def surplus(self, num_rows: int) -> Iterator[tuple[int, Any]]:
        """The entries that the arena's journal has no room for (long prompts that join together), for ``apply``.

        Each is a copy of its own; torch keeps the pinned memory of such a copy until it is complete.
        """
        for index, host in enumerate(self.host):
            while True:
                entries = torch.empty(2 * SURPLUS_ENTRIES, dtype=torch.int32, device="cpu", pin_memory=self._cuda)
                count = host.state.journal(num_rows, entries.numpy())
                if count == 0:
                    break
                yield index, entries[: 2 * count].view(torch.int64).to(self.device, non_blocking=self._cuda)

    def forget(self) -> None:
        """Makes the next step send every block again: after a failure it is not known what arrived."""
        for table in self.host:
            table.state.forget_synced()

    def clear(self) -> None:
        """Fills the device tables with 0."""
        for table in self.tensors:
            table.zero_()

    def page_buffer(self, index: int) -> Any:
        """The buffer of page indices, int32[rows * width], at a fixed address."""
        if self._page_indices[index] is None:
            self._page_indices[index] = device_zeros(self.tensors[index].numel(), torch.int32, self.device)
        return self._page_indices[index]

    def gather_pages(self, index: int, metadata: Any) -> Any:
        """Gathers a step's pages from table ``index``: int32[indptr[-1]], a slice of the page buffer."""
        table, buffer = self.tensors[index], self.page_buffer(index)
        indptr = metadata.host.paged_kv_indptr
        num_pages = int(indptr[-1])
        if num_pages == 0:
            return buffer[:0]
        if self._kernels is not None:
            longest = int(np.diff(indptr).max())
            self._kernels.gather_pages(table, metadata.paged_kv_indptr, buffer, longest)
            return buffer[:num_pages]
        device_indptr, filled = metadata.paged_kv_indptr, num_pages
        if self.device == "cpu":  # it can be read, and may have been written to; torch trusts it
            filled = _checked_pages(device_indptr.numpy(), table.shape[1], num_pages)
        rows = torch.repeat_interleave(
            torch.arange(len(indptr) - 1, device=self.device), device_indptr.diff(), output_size=filled
        )
        columns = torch.arange(filled, device=self.device) - device_indptr[rows]
        buffer[:filled] = table[rows, columns]
        return buffer[:num_pages]

    def gather_pages_there(self, index: int, indptr: Any) -> None:
        """Gathers pages from table ``index`` into the page buffer, as ``indptr`` on the device counts them, without a
        look at it from the host. What lies behind the last page stays.
        """
        table, buffer = self.tensors[index], self.page_buffer(index)
        at = torch.arange(len(buffer), dtype=torch.int32, device=self.device)
        rows = (torch.searchsorted(indptr, at, right=True) - 1).clamp(0, len(table) - 1)
        columns = (at - indptr[rows]).clamp(0, table.shape[1] - 1)
        buffer.copy_(torch.where(at < indptr[-1], table[rows, columns], buffer))


def _checked_pages(indptr: npt.NDArray[np.int32], width: int, most: int) -> int:
    """How many pages ``indptr`` counts: fewer than ``most``, the host's bound, where drafts were rejected."""
    counts = np.diff(indptr)
    if indptr[0] or counts.min() < 0 or counts.max() > width or indptr[-1] > most:
        raise ValueError(
            f"metadata: paged_kv_indptr was written to, and counts no pages of a table of {counted(width, 'column')} "
            "any more; metadata is read-only"
        )
    return int(indptr[-1])
