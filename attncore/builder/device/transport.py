"""The choice of a transport.

None on a CPU, where steps are read where they are built, unless ``copy`` is asked for; elsewhere ``graph`` where a test
of its nodes succeeds, else ``copy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncore.builder.device.arena import ArenaRing
    from attncore.builder.device.by_copy import CopyTransport
    from attncore.builder.device.tables import HostTable

TRANSPORTS = ("auto", "graph", "copy")


def sends(transport: str, device: str) -> bool:
    """Whether steps are sent to ``device``, and not read where they are built; ``transport`` is one of TRANSPORTS."""
    return transport != "auto" or not device.startswith("cpu")


def new_transport(
    transport: str, device: str, tables: Sequence[HostTable], page_lists: Sequence[int]
) -> CopyTransport | None:
    """A transport before it has arenas, or None where steps are read where they are built.

    Raises ValueError for a transport that the device does not have.
    """
    if not sends(transport, device):
        return None
    from attncore.builder.device.by_copy import CopyTransport

    if transport == "copy":
        return CopyTransport(device, tables, page_lists)
    if not device.startswith("cuda"):
        if transport == "graph":
            raise ValueError(f"transport: graph, but {device} has no CUDA graphs; leave it at auto")
        side = CopyTransport(device, tables, page_lists)
        side.why = f"{device} has no CUDA graphs"
        return side
    try:
        from attncore.builder.device.by_graph import GraphTransport
    except ImportError as error:
        if transport == "graph":
            raise
        side = CopyTransport(device, tables, page_lists)
        side.why = f"no triton here for the nodes of graphs ({error})"
        return side
    return GraphTransport(device, tables, page_lists)


def attach_transport(side: CopyTransport, ring: ArenaRing, transport: str) -> CopyTransport:
    """Attaches ``side`` to the ring's arenas; ``copy`` in its place where its test fails and ``transport`` is ``auto``.

    RuntimeError where the test fails and ``transport`` is ``graph``.
    """
    from attncore.builder.device.by_copy import CopyTransport

    side.attach(ring)
    problem = side.problem()
    if not problem:
        return side
    side.close()  # its graphs are gone: nothing reads its memory
    if transport == "graph":
        raise RuntimeError(f"transport: graph does not work on {side.device}: {problem}; leave it at auto")
    other = CopyTransport(side.device, side.tables.host, side.page_lists)
    other.why = f"nodes of graphs failed their test ({problem})"
    other.attach(ring)
    return other
