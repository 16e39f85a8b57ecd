"""The tensors of a step as ``AdoptedSteps`` takes them, at fixed addresses, made of SGLang's ForwardBatch.

SGLang counts lengths in int64 and keeps the slot of every token (``req_to_token``); attncore takes lengths in int32
and pages. Nothing here reads the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch


class HostRows(NamedTuple):
    """What the host knows of a step's rows."""

    starts: np.ndarray[Any, np.dtype[np.int32]]
    """int32[n + 1]"""
    lengths: np.ndarray[Any, np.dtype[np.int32]] | None
    """int32[n]; None where SGLang keeps them on the device alone."""


def host_rows(batch: Any) -> HostRows:
    """The rows of a ForwardBatch: decodes of one token, or what each request extends by."""
    count = batch.batch_size
    starts = np.arange(count + 1, dtype=np.int32)
    if not batch.forward_mode.is_decode():
        np.cumsum(np.asarray(batch.extend_seq_lens_cpu[:count], np.int32), out=starts[1:])
    known = batch.seq_lens_cpu
    return HostRows(starts, None if known is None else known[:count].numpy().astype(np.int32))


class StepTensors:
    """Buffers of the rows of a step, on the device, filled anew for each."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int) -> None:
        rows, tokens = req_to_token.shape
        self._first_slots, self._page_size = req_to_token[:, ::page_size], page_size
        self.max_num_reqs, self.max_model_len = rows, tokens
        self.columns = self._first_slots.shape[1]
        """Pages of the longest request."""
        int32: dict[str, Any] = {"dtype": torch.int32, "device": req_to_token.device}
        self._counted = torch.arange(rows + 1, **int32)
        self._starts, self._lengths = torch.zeros(rows + 1, **int32), torch.zeros(rows, **int32)
        self._table = torch.zeros((rows, self.columns), **int32)
        self._window_table = torch.zeros_like(self._table)
        self._slots: dict[bool, torch.Tensor] = {}
        """Of captured sizes, whose graphs read them here; by whether they are the window pool's."""

    def fill(self, batch: Any, host: HostRows) -> int:
        """Fills the rows for ``batch``; returns the number of the table's columns that it uses."""
        count = batch.batch_size
        self._lengths[:count].copy_(batch.seq_lens[:count])
        if not batch.forward_mode.is_decode():
            torch.cumsum(batch.extend_seq_lens[:count], 0, dtype=torch.int32, out=self._starts[1 : count + 1])
        if host.lengths is None:
            return self.columns
        return min(self.columns, -(-int(host.lengths.max()) // self._page_size))

    def rows(self, batch: Any, columns: int, pool: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``query_start_loc``, ``seq_lens`` and ``block_table``; of the window pool where one is given."""
        count = batch.batch_size
        table = self._table if pool is None else self._window_table
        table = table[:count, :columns]
        first = self._first_slots[:, :columns].index_select(0, batch.req_pool_indices[:count])
        if pool is not None:
            first = pool.translate_loc_from_full_to_swa(first.to(torch.int64))
        if self._page_size > 1:
            first = first.div(self._page_size, rounding_mode="floor")
        table.copy_(first)
        starts = self._counted if batch.forward_mode.is_decode() else self._starts
        return starts[: count + 1], self._lengths[:count], table

    def slots(self, batch: Any, pool: Any, *, graph: bool) -> torch.Tensor:
        """``slot_mapping``: SGLang's own tensor, but of a captured size a copy at a fixed address."""
        slots = batch.out_cache_loc
        if pool is not None:
            slots = pool.translate_loc_from_full_to_swa(slots)
        given: torch.Tensor = slots.to(torch.int64)
        if not graph:
            return given
        kept = self._slots.get(pool is not None)
        if kept is None:
            kept = self._slots[pool is not None] = torch.zeros(
                self.max_num_reqs, dtype=torch.int64, device=given.device
            )
        return kept[: len(given)].copy_(given)
