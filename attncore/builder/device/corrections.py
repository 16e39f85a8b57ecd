"""Exact lengths, positions, slots and pages on the device for overlapped steps, where the host had upper bounds."""

from __future__ import annotations

from typing import Any

import torch

from attncore.builder.device.arena import STEPS_OWN, ArenaRing, Capacity, Views
from attncore.builder.device.group_places import slots_and_pages
from attncore.builder.device.tables import DeviceTables

_STEP_FIELDS = ("previous_rows", "context_lens", "seq_lens", "seq_start_loc", "token_to_req_indices", "positions")
"""In the order of the kernel's arguments (``device.triton_kernels.correct_lengths``)."""
NEEDED = (*_STEP_FIELDS, "slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len")
"""What is read or corrected, and is sent with every step therefore."""


class Corrections:
    """Subtracts the rejected tokens of the last step from the lengths of this one.

    ``num_rejected`` int32[max_num_reqs] on the device, by row of the last step.
    """

    def __init__(self, ring: ArenaRing, tables: DeviceTables, num_rejected: Any) -> None:
        self._ring, self._tables, self.num_rejected = ring, tables, num_rejected
        self._places: dict[Capacity, tuple[Any, Any, Any]] = {}

    def launch(self, arena: Any, capacity: Capacity) -> None:
        """On CUDA: launches the kernel over the device's ``arena``, whose header has the numbers of rows and tokens."""
        from attncore.builder.device import triton_kernels

        triton_kernels.correct_lengths(
            arena, self.num_rejected, *self._pointers_of(capacity), capacity.num_reqs, capacity.num_tokens
        )

    def compute(self, views: Views, num_rows: int, num_tokens: int, running: int) -> None:
        """The same in torch, for a device without Triton kernels. ``running``: rows without the padded ones."""
        fields = {name: field[:num_rows] for name, field in views.fields.items()}
        fields |= {name: views.fields[name][:num_tokens] for name in ("positions", "token_to_req_indices")}
        previous = fields["previous_rows"].long()
        fewer = torch.where(previous >= 0, self.num_rejected[previous.clamp(min=0)], 0).clamp(min=0)
        fewer = torch.minimum(fewer, fields["context_lens"])
        for name in ("context_lens", "seq_lens"):
            fields[name] -= fewer
        views.fields["seq_start_loc"][1 : num_rows + 1] = fields["seq_lens"].cumsum(0)
        with_pages = torch.where(torch.arange(num_rows, device=fewer.device) < running, fields["seq_lens"], 0)
        rows = fields["token_to_req_indices"].long()
        changed = fewer[rows] > 0
        fields["positions"] -= fewer[rows]
        fields["positions"].clamp_(min=0)
        for group, (host, table) in enumerate(zip(self._tables.host, self._tables.tensors, strict=True)):
            if host.group.cross:
                continue
            slots = views.groups[group]["slot_mapping"][:num_tokens]
            block_size = host.group.tokens_per_column
            columns = (fields["positions"] // block_size).clamp(max=table.shape[1] - 1)
            exact = table[rows, columns].long() * block_size + fields["positions"] % block_size
            slots.copy_(torch.where(changed & (slots >= 0), exact, slots))
            pages = (with_pages + block_size - 1) // block_size
            views.groups[group]["paged_kv_indptr"][1 : num_rows + 1] = pages.cumsum(0)
            last = with_pages - (pages - 1) * block_size
            views.groups[group]["paged_kv_last_page_len"][:num_rows].copy_(torch.where(pages > 0, last, 0))

    def _pointers_of(self, capacity: Capacity) -> tuple[Any, Any, Any]:
        """The offsets and addresses that the kernel needs for a capacity: made once, kept on the device."""
        pointers = self._places.get(capacity)
        if pointers is None:
            places = self._ring.places(capacity)
            steps_own = [places[STEPS_OWN, name] for name in _STEP_FIELDS]
            pointers = self._places[capacity] = (
                torch.tensor(steps_own, dtype=torch.int64, device=self._tables.device),
                *slots_and_pages(self._ring, self._tables, capacity),
            )
        return pointers
