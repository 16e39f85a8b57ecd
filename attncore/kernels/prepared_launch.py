"""The launch of a compiled Triton kernel without what ``compiled[grid]`` does around each: most of its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

Launch = Callable[..., None]

_ANOTHER_WAY = (AttributeError, TypeError, ValueError, RuntimeError, SystemError)


def prepared_launch(compiled: Any, device_index: int, *trial: Any) -> Launch:
    """``launch(rows, blocks, *arguments)``: a grid of two dimensions, on the current stream of the device.

    Pointers are addresses: of a tensor the driver is asked where its memory is. ``trial`` are arguments of a launch
    that does no harm, by which it is tried whether this Triton launches as all of Triton 3 do; one that does not is
    called its own way. Hooks of profilers see its own way alone.
    """

    def own_way(rows: int, blocks: int, *arguments: Any) -> None:
        compiled[rows, blocks, 1](*arguments)

    try:
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        stream_of = _current_stream()

        def launch(rows: int, blocks: int, *arguments: Any) -> None:
            # After what was packed: metadata of the launch and two hooks, for profilers.
            run(rows, blocks, 1, stream_of(device_index), function, packed, None, None, None, *arguments)

        launch(1, 1, *trial)
    except _ANOTHER_WAY:
        return own_way
    return launch


def _current_stream() -> Callable[[int], int]:
    stream_of: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    return stream_of
