"""CUDA graphs: whether a stream is capturing one, and a stand-in that records and replays where there is no CUDA.

An engine that uses ``capturing`` and ``launch`` runs on both: on CUDA they are torch's own capture and a plain call.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attncore.errors import CaptureError


class _Open(threading.local):
    """The stand-in capture that is open in this thread."""

    graph: StandInGraph | None = None


_open = _Open()


def is_capturing(device: str) -> bool:
    """Whether the current stream of ``device`` (as torch writes it) is capturing a graph.

    On other devices than CUDA ones: whether this thread is inside the capture of a StandInGraph.
    """
    if not device.startswith("cuda"):
        return _open.graph is not None
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


def refuse_while_capturing(device: str, what: str) -> None:
    """CaptureError that begins with ``what``, a call that plans or copies, where ``device`` is capturing a graph."""
    if is_capturing(device):
        raise CaptureError(
            f"{what}: a stream is capturing, and this plans or copies from the host, which a graph must not record; "
            "call it before the capture begins, and before each replay"
        )


class StandInGraph:
    """In place of ``torch.cuda.CUDAGraph`` on a device without graphs: a list of calls, which a replay makes again.

    ``launch`` records them inside ``capturing``. As with a CUDA graph, a replay uses the arguments of the capture and
    writes its results to the tensors or arrays that the capture returned. Unlike with one, the functions run during the
    capture too, and their Python code runs again at each replay.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._captured = False

    def replay(self) -> None:
        """Makes every recorded call again, in order. CaptureError inside a capture, and for a graph without one."""
        if _open.graph is not None:
            raise CaptureError("replay: a capture is open in this thread; leave it first")
        if not self._captured:
            raise CaptureError("replay: this graph holds no capture; capture it first, with graphs.capturing(graph)")
        for function, args, kwargs, result in self._calls:
            _write(result, function(*args, **kwargs))

    def reset(self) -> None:
        """Forgets the capture."""
        self._calls, self._captured = [], False


def new_graph(device: str) -> Any:
    """An empty ``torch.cuda.CUDAGraph`` for a CUDA ``device``, else a StandInGraph."""
    if not device.startswith("cuda"):
        return StandInGraph()
    import torch

    return torch.cuda.CUDAGraph()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage inside, since a CUDA graph that is destroyed during another's capture invalidates that."""
    collects = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def capturing(graph: Any, **options: Any) -> Iterator[Any]:
    """Captures into ``graph`` what is launched inside: ``torch.cuda.graph(graph, **options)``, or recorded calls.

    CaptureError inside another capture, and for a StandInGraph that holds one already. A body that fails leaves a
    StandInGraph empty. No garbage is collected during a capture on CUDA.
    """
    if not isinstance(graph, StandInGraph):
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("capturing: a stream is capturing already; end that capture first")
        gc.collect()
        with uncollected(), torch.cuda.graph(graph, **options):
            yield graph
        return
    if _open.graph is not None:
        raise CaptureError("capturing: a capture is open in this thread; end that capture first")
    if graph._captured:
        raise CaptureError("capturing: this graph holds a capture already; take a new graph, or reset this one")
    try:
        _open.graph = graph
        yield graph
        graph._captured = True
    finally:
        _open.graph = None
        if not graph._captured:
            graph.reset()


def launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, recorded where this thread captures a StandInGraph; on CUDA the call alone.

    A recorded function returns a tensor, an array, a tuple of these, or None.
    """
    result = function(*args, **kwargs)
    if _open.graph is not None:
        _open.graph._calls.append((function, args, kwargs, result))
    return result


def _write(target: Any, value: Any) -> None:
    """Writes a replay's results to the tensors or arrays of the capture's."""
    if isinstance(target, tuple):
        for one, other in zip(target, value, strict=True):
            _write(one, other)
    elif target is not None and target is not value:
        target[...] = value
