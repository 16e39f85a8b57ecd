"""Where a step's slots and pages lie in the device's arena, as kernels read it that make them again there."""

from __future__ import annotations

from typing import Any

import torch

from attncore.builder.device.arena import ArenaRing, Capacity
from attncore.builder.device.tables import DeviceTables


def slots_and_pages(ring: ArenaRing, tables: DeviceTables, capacity: Capacity) -> tuple[Any, Any]:
    """On the device, of the decoder groups: int64[g, 4] (slots, table's address and stride, block size), and of those
    with page lists of their own int64[p, 3] (indptr, last page lengths, block size). Places are int32 words.
    """
    places, groups, pages = ring.places(capacity), [], []
    for index, (host, table) in enumerate(zip(tables.host, tables.tensors, strict=True)):
        if host.group.cross:
            continue
        tokens = host.group.tokens_per_column
        groups.append([places[index, "slot_mapping"], table.data_ptr(), table.stride(0), tokens])
        if index in ring.page_owners:
            pages.append([places[index, "paged_kv_indptr"], places[index, "paged_kv_last_page_len"], tokens])
    device = tables.device
    return torch.tensor(groups, dtype=torch.int64, device=device), torch.tensor(pages, dtype=torch.int64, device=device)
