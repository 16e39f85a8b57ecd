"""Which road a builder's steps take to the device: nodes of graphs where these prove to work, else one packed copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncore.builder.device.arena import ArenaRing
    from attncore.builder.device.by_copy import DeviceSide
    from attncore.builder.persistent.block_table import BlockTable

TRANSPORTS = ("auto", "graph", "copy")


def new_side(transport: str, device: str, tables: Sequence[BlockTable], page_lists: Sequence[int]) -> DeviceSide | None:
    """The device's side to begin with, or None where steps are read where they are built."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: {transport!r} is not one of {', '.join(TRANSPORTS)}")
    if device == "cpu" and transport == "auto":
        return None
    from attncore.builder.device.by_copy import DeviceSide

    if transport == "copy":
        return DeviceSide(device, tables, page_lists)
    if not device.startswith("cuda"):
        raise ValueError(f"transport: graph, but {device} has no graphs; leave it at auto")
    try:
        from attncore.builder.device.by_graph import GraphSide
    except ImportError as error:
        if transport == "graph":
            raise
        side = DeviceSide(device, tables, page_lists)
        side.why = f"no triton here for the nodes of graphs ({error})"
        return side
    return GraphSide(device, tables, page_lists)


def attached(side: DeviceSide, ring: ArenaRing, transport: str) -> DeviceSide:
    """The side over the ring's arenas; another one, by copies, where the nodes of graphs fail their test."""
    from attncore.builder.device.by_copy import DeviceSide

    side.attach(ring)
    problem = side.problem()
    if not problem:
        return side
    if transport == "graph":
        raise RuntimeError(f"transport: graph does not work on {side.device}: {problem}; leave it at auto")
    other = DeviceSide(side.device, side.host_tables, side.page_lists)
    other.why = f"nodes of graphs failed their test ({problem})"
    other.attach(ring)
    return other
