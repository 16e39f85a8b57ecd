"""Steps ahead: the device makes the next step of one token for every request out of the last one, without the host.

Lengths, positions, slots of every group, page pointers and last page lengths are made again from the device's own
tables, which hold the blocks of all these steps already. A row without a request stays as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attncore.builder.device.arena import HEADER_NBYTES, STEPS_OWN, ArenaRing, Capacity, Views
from attncore.builder.device.group_places import slots_and_pages
from attncore.builder.device.tables import DeviceTables
from attncore.kernels.codes import HEADER_RUNNING

_SOURCES = (("seq_lens", 1, 0), ("context_lens", 1, 1), ("positions", 2, 1))
"""Fields that a length is read from: its name, int32 words from row to row, what makes it the next token's position."""

_STEP_FIELDS = ("context_lens", "seq_lens", "seq_start_loc", "positions")
"""In the order of the kernel's arguments (``device.triton_ahead``), behind the source of lengths."""

ADVANCED = frozenset((*_STEP_FIELDS, "slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len"))
"""What changes from one step ahead to the next; all else is as the first step was sent."""


class Places(NamedTuple):
    """Where the kernel finds a step's fields: tensors on the device."""

    where: Any
    groups: Any
    pages: Any


class Ahead:
    """Advances the step in the device's arena, by a kernel of ``places``' arguments or in torch."""

    def __init__(self, ring: ArenaRing, tables: DeviceTables) -> None:
        self._ring, self._tables = ring, tables
        self._places: dict[Capacity, Places] = {}

    @property
    def source(self) -> tuple[str, int, int]:
        """The field that lengths are read from: the first that steps are sent with; positions always are."""
        return next(source for source in _SOURCES if source[0] not in self._ring.unsent)

    def places(self, capacity: Capacity) -> Places:
        """What the kernel needs for a capacity: made once, kept on the device."""
        if capacity not in self._places:
            places = self._ring.places(capacity)
            name, stride, shift = self.source
            where = [places[STEPS_OWN, name], stride, shift, *(places[STEPS_OWN, name] for name in _STEP_FIELDS)]
            self._places[capacity] = Places(
                torch.tensor(where, dtype=torch.int64, device=self._tables.device),
                *slots_and_pages(self._ring, self._tables, capacity),
            )
        return self._places[capacity]

    def start_of(self, views: Views) -> tuple[Any, Any]:
        """Of the step in the arena, copies: the position of each row's next token, and ``seq_start_loc``."""
        name, _, shift = self.source
        rows = len(views.fields["seq_lens"])
        return views.fields[name][:rows].long() + shift, views.fields["seq_start_loc"].clone()

    def compute(self, arena: Any, views: Views, start: tuple[Any, Any], steps: int, page_lists: list[int]) -> None:
        """In torch, of fixed shapes: makes the step in ``arena`` that is ``steps`` behind the one of ``start_of``.

        It writes what the arguments alone say, so that it may be done twice.
        """
        fields, (first, starts) = views.fields, start
        running = arena[:HEADER_NBYTES].view(torch.int64)[HEADER_RUNNING]
        rows = torch.arange(len(first), device=first.device)
        runs = rows < running
        positions = first + (steps - 1)
        for name, value in (("positions", positions), ("context_lens", positions), ("seq_lens", positions + 1)):
            _write(fields[name], value, runs)
        more = torch.minimum(torch.arange(len(starts), device=first.device), running) * steps
        fields["seq_start_loc"].copy_(starts + more)
        for index, (host, table) in enumerate(zip(self._tables.host, self._tables.tensors, strict=True)):
            if host.group.cross:
                continue
            size, group = host.group.tokens_per_column, views.groups[index]
            columns = (positions // size).clamp(0, table.shape[1] - 1)
            _write(group["slot_mapping"], table[rows, columns].long() * size + positions % size, runs)
            if index in self._ring.page_owners:
                pages = torch.where(runs, positions // size + 1, 0)
                group["paged_kv_indptr"][1:].copy_(pages.cumsum(0))
                _write(group["paged_kv_last_page_len"], positions % size + 1, runs)
        for index in page_lists:
            self._tables.gather_pages_there(index, views.groups[index]["paged_kv_indptr"])


def _write(field: Any, values: Any, where: Any) -> None:
    """Writes ``values`` to the rows of ``field`` where a request runs."""
    field[: len(values)].copy_(torch.where(where, values.to(field.dtype), field[: len(values)]))
