"""The device's side of a builder: one arena, the tables that follow the batch's, and page indices. In torch.

A step goes there as one packed copy of its pinned arena, and an event says when the arena may be written again. The
block table does not travel: a table of fixed stride lives on the device, and a journal of new columns at the arena's
tail brings it up to date.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore import graphs
from attncore.builder.device.arena import ALIGNMENT, COUNTS, JOURNAL_ENTRY, Views

if TYPE_CHECKING:
    from attncore.builder.device.arena import ArenaRing, Capacity
    from attncore.builder.persistent.block_table import BlockTable

JOURNAL_ENTRIES = 4096
"""Block ids that travel with a step to the device's tables; more of them go in copies of their own."""
SURPLUS_ENTRIES = 1 << 16


_KEPT: list[Any] = []
"""Memory of builders that were dropped and not closed: a graph may still read it."""


class DeviceSide:
    """What a builder keeps on ``device`` (as torch writes it; ``cpu`` works too and copies, for tests).

    ``tables`` are the batch's, a device table each; ``page_lists`` are the groups that need page indices in each
    step. All memory is taken here, before any capture. Everything runs on the stream that is current when a step is
    built: one compute stream a builder.
    """

    road = "copy"
    """How a step gets here."""

    def __init__(self, device: str, tables: Sequence[BlockTable], page_lists: Sequence[int] = ()) -> None:
        import torch

        self._torch, self.device = torch, device
        self._cuda = device.startswith("cuda")
        self._index = 0
        if self._cuda:
            index = torch.device(device).index
            self._index = torch.cuda.current_device() if index is None else index
        self.journal_entries = JOURNAL_ENTRIES
        self.page_lists = list(page_lists)
        self.why = "asked for"
        self.host_tables = list(tables)
        with torch.inference_mode(False):  # steps are sent in that mode and outside of it
            self.tables = [torch.zeros(table.array.shape, dtype=torch.int32, device=device) for table in tables]
        self._page_indices: list[Any] = [None] * len(self.tables)
        self._places: dict[Capacity, Any] = {}
        self.ticket = False
        """Whether the engine replays graphs by itself: a step's number is then written to the device as it is built."""
        self.num_rejected: Any = None
        """int32 on the device, by row of the last step, where steps overlap: how many of its tokens were rejected."""
        self._kernels: Any = None
        if self._cuda:
            from attncore.builder.device import kernels as device_kernels

            self._kernels = device_kernels

    def attach(self, ring: ArenaRing) -> None:
        """Takes the device arena and an event for each of the ring's arenas."""
        torch = self._torch
        self._ring = ring
        with torch.inference_mode(False):
            self._arena = torch.zeros(ring.arena_nbytes, dtype=torch.uint8, device=self.device)
        self._pinned = [torch.from_numpy(memory) for memory in ring.memory]
        if self._cuda:  # graphs and copies know the memory by its address only: dropped, it stays
            self._keeper = weakref.finalize(self, _KEPT.append, (ring.memory, self._arena, self.tables))
            self._keeper.atexit = False
        self._events: list[Any] = [torch.cuda.Event() if self._cuda else None for _ in ring.memory]
        self._recorded = [False] * len(ring.memory)
        self.sent = -1
        """The last step that was sent."""
        self._receipt = torch.full((1,), -1, dtype=torch.int64, pin_memory=self._cuda)
        rows = [table.rows for table in self.host_tables]
        self._sender = self.host_tables[0].kernels.StepSender(
            ring.addresses(), rows, ring.journal_entries, self._receipt.numpy()
        )
        self.is_capturing: Callable[[], bool] = partial(graphs.is_capturing, self.device)
        if self._cuda:
            self.is_capturing, self._current = torch.cuda.is_current_stream_capturing, torch.cuda.current_device

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that the device copies from without a stop; MemoryError where there is none."""
        try:
            memory = self._torch.zeros(nbytes + ALIGNMENT, dtype=self._torch.uint8, pin_memory=self._cuda)
        except RuntimeError as error:
            raise MemoryError(
                f"arenas: no {nbytes} bytes of pinned host memory ({error}); lower "
                "max_num_batched_tokens, max_num_reqs or depth"
            ) from error
        array: npt.NDArray[np.uint8] = memory.numpy()
        start = -memory.data_ptr() % ALIGNMENT
        return array[start : start + nbytes]  # a view: it keeps the pinned memory

    @property
    def nbytes(self) -> int:
        """Device memory: arena, tables, page indices."""
        tensors = [self._arena, *self.tables, *(one for one in self._page_indices if one is not None)]
        return sum(one.numel() * one.element_size() for one in tensors)

    def problem(self) -> str:
        """Why this road cannot be taken here; empty: it can."""
        return ""

    def prepare(self, size: Capacity) -> Any:
        """Makes what steps of ``size`` need before the first of them; what their bucket keeps as ``replay``."""

    def check_ready(self) -> None:
        """Raises where no step can be sent now: another device is current (RuntimeError)."""
        if self._cuda and self._current() != self._index:
            raise RuntimeError(
                f"build: cuda:{self._current()} is the current device, but this builder's steps go "
                f"to cuda:{self._index}; build inside torch.cuda.device({self._index})"
            )

    def close(self) -> None:
        """Waits for the device; the memory may go."""
        if self._cuda:
            self._torch.cuda.synchronize(self._index)
            self._keeper.detach()

    def record(self, bucket: Any) -> None:
        """Called inside a capture, first. Nothing: a step is there before its graph is replayed."""

    def replay(self, step: int, graph: Any) -> None:
        """Replays a graph over ``step``."""
        graph.replay()

    def release(self, bucket: Any) -> None:
        """The graph that was captured over a size is gone."""

    def recorded(self) -> list[int]:
        """Requests of the captured graphs that read the arenas by themselves."""
        return []

    def abandon(self, step: int) -> bool:
        """Whether ``step`` was waiting for its replay and no longer is."""
        return False

    def views(self, size: Capacity) -> Views:
        """The device arena's fields for steps of ``size``, as tensors."""
        return self._ring.views_of(size, self._view)

    def _view(self, offset: int, length: int, dtype: type[np.generic]) -> Any:
        nbytes = length * np.dtype(dtype).itemsize
        return self._arena[offset : offset + nbytes].view(getattr(self._torch, np.dtype(dtype).name))

    def wait(self, step: int) -> None:
        """Until the device has read the arena of ``step``; at once where there was no such step."""
        arena = step % self._ring.depth
        if step >= 0 and self._recorded[arena]:
            self._wait_for(arena)

    def send(self, step: int, bucket: Any, out: Any, num_rows: int, waits: bool) -> None:
        """Sends a step's arena and the journal of ``num_rows`` rows; then the device's tables are the batch's.

        ``bucket`` is the step's StepShape, ``out`` its StepArena. ``waits``: a graph will be replayed over the step.
        """
        arena = step % self._ring.depth
        total = self._sender.write(step, bucket, out, num_rows)
        if total == self._ring.journal_entries:
            self._send_surplus(num_rows)
        start = bucket.tail
        stop = start + JOURNAL_ENTRY * total
        counts = self._ring.header(arena)[COUNTS : COUNTS + len(self.tables)].tolist()
        self._issue(self._copy, arena, stop)
        self._record(arena)
        self._recorded[arena] = True
        for device_table, count in zip(self.tables, counts, strict=True):
            if count:
                entries = self._arena[start : start + JOURNAL_ENTRY * count].view(self._torch.int64)
                self._issue(self._apply, device_table, entries)
                start += JOURNAL_ENTRY * count
        if self.num_rejected is not None:
            self._issue(self._correct, bucket.size, out.num_reqs, out.num_tokens)
        self.sent = step

    # What the device does, in the order of its stream; a test's stream does it later.

    def _issue(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def _record(self, arena: int) -> None:
        if self._cuda:
            self._events[arena].record()

    def _wait_for(self, arena: int) -> None:
        if self._cuda:
            self._events[arena].synchronize()

    def _copy(self, arena: int, nbytes: int) -> None:
        self._arena[:nbytes].copy_(self._pinned[arena][:nbytes], non_blocking=True)

    def _correct(self, size: Capacity, num_rows: int, num_tokens: int) -> None:
        """Makes lengths, positions, slots and pages exact, where the host had bounds."""
        if self._kernels is not None:
            self._kernels.correct_lengths(
                self._arena, self.num_rejected, *self._corrections(size), size.num_reqs, size.num_tokens
            )
            return
        torch, views = self._torch, self.views(size)
        fields = {name: field[:num_rows] for name, field in views.fields.items()}
        fields |= {name: views.fields[name][:num_tokens] for name in ("positions", "token_to_req_indices")}
        previous = fields["previous_rows"].long()
        fewer = torch.where(previous >= 0, self.num_rejected[previous.clamp(min=0)], 0).clamp(min=0)
        fewer = torch.minimum(fewer, fields["context_lens"])
        for name in ("context_lens", "seq_lens"):
            fields[name] -= fewer
        views.fields["seq_start_loc"][1 : num_rows + 1] = fields["seq_lens"].cumsum(0)
        rows = fields["token_to_req_indices"].long()
        changed = fewer[rows] > 0
        fields["positions"] -= fewer[rows]
        fields["positions"].clamp_(min=0)
        for group, table in enumerate(self.tables):
            if self.host_tables[group].group.cross:
                continue
            slots = views.groups[group]["slot_mapping"][:num_tokens]
            size_of = self.host_tables[group].group.tokens_per_column
            columns = (fields["positions"] // size_of).clamp(max=table.shape[1] - 1)
            exact = table[rows, columns].long() * size_of + fields["positions"] % size_of
            slots.copy_(torch.where(changed & (slots >= 0), exact, slots))
            pages = (fields["seq_lens"] + size_of - 1) // size_of
            views.groups[group]["paged_kv_indptr"][1 : num_rows + 1] = pages.cumsum(0)
            last = fields["seq_lens"] - (pages - 1) * size_of
            views.groups[group]["paged_kv_last_page_len"][:num_rows].copy_(torch.where(pages > 0, last, 0))

    def _corrections(self, size: Capacity) -> tuple[Any, Any, Any]:
        """What ``correct_lengths`` must know of a size: made once, kept on the device."""
        found = self._places.get(size)
        if found is None:
            at = self._ring.places(size)
            names = ("previous_rows", "context_lens", "seq_lens", "seq_start_loc", "token_to_req_indices", "positions")
            groups, pages = [], []
            for index, (host, table) in enumerate(zip(self.host_tables, self.tables, strict=True)):
                if host.group.cross:
                    continue
                tokens = host.group.tokens_per_column
                groups.append([at[index, "slot_mapping"], table.data_ptr(), table.stride(0), tokens])
                if index in self._ring.page_owners:
                    pages.append([at[index, "paged_kv_indptr"], at[index, "paged_kv_last_page_len"], tokens])
            lists: tuple[Any, ...] = ([at[-1, name] for name in names], groups, pages)
            found = tuple(self._torch.tensor(one, dtype=self._torch.int64, device=self.device) for one in lists)
            self._places[size] = found
        return found

    def _send_surplus(self, num_rows: int) -> None:
        """What the arena's journal has no room for, such as long prompts that join at once: copies of their own.

        torch keeps the pinned memory of such a copy until it is done.
        """
        for table, host in zip(self.tables, self.host_tables, strict=True):
            while True:
                entries = self._torch.empty(2 * SURPLUS_ENTRIES, dtype=self._torch.int32, pin_memory=self._cuda)
                count = host.rows.journal(num_rows, entries.numpy())
                if count == 0:
                    break
                sent = entries[: 2 * count].view(self._torch.int64).to(self.device, non_blocking=True)
                self._issue(self._apply, table, sent)

    def _apply(self, table: Any, entries: Any) -> None:
        """Writes journal entries (flat index in the low half, block id in the high half) to a table."""
        if self._kernels is not None:
            self._kernels.apply_journal(table, entries)
            return
        torch = self._torch
        table.view(-1).index_copy_(0, entries & 0xFFFFFFFF, (entries >> 32).to(torch.int32))

    def forget_tables(self) -> None:
        """After a failure nobody knows what arrived: the next commit sends every block again."""
        for table in self.host_tables:
            table.rows.forget_synced()

    def pages_of(self, index: int, metadata: Any) -> Any:
        """``paged_kv_indices`` of a step, made when first asked for after it was sent.

        A plan comes before that: it may know where they will be, and not read them.
        """
        if self.sent < metadata.step:
            return self.page_buffer(index)[: int(metadata.host.paged_kv_indptr[-1])]
        return metadata._this_step("_indices", lambda: self._gathered(index, metadata))

    def _gathered(self, index: int, metadata: Any) -> Any:
        """int32[indptr[-1]]: the pages of the step's requests, from the device's table, in a buffer that stays."""
        torch, table, buffer = self._torch, self.tables[index], self.page_buffer(index)
        indptr = metadata.host.paged_kv_indptr
        num_pages = int(indptr[-1])
        if num_pages == 0:
            return buffer[:0]
        if self._kernels is not None:
            longest = int(np.diff(indptr).max())
            self._kernels.gather_pages(table, metadata.paged_kv_indptr, buffer, longest)
            return buffer[:num_pages]
        device_indptr = metadata.paged_kv_indptr
        rows = torch.repeat_interleave(
            torch.arange(len(indptr) - 1, device=self.device), device_indptr.diff(), output_size=num_pages
        )
        columns = torch.arange(num_pages, device=self.device) - device_indptr[rows]
        buffer[:num_pages] = table[rows, columns]
        return buffer[:num_pages]

    def page_buffer(self, index: int) -> Any:
        """The whole buffer that page indices are written to: int32[rows * width], at a fixed address."""
        if self._page_indices[index] is None:
            with self._torch.inference_mode(False):
                self._page_indices[index] = self._torch.zeros(
                    self.tables[index].numel(), dtype=self._torch.int32, device=self.device
                )
        return self._page_indices[index]
