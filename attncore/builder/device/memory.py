"""Memory for steps: aligned, pinned where a device copies from it, with events that say when it has been read.

Both builders take their memory here: the arenas of the persistent builder and the staging blocks of the list builder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from attncore.array_arguments import of_fixed_size
from attncore.show import counted

ALIGNMENT = 128
"""Bytes: the largest cache line of the devices, so that no two fields share one."""


def aligned_up(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Owner:
    """Owns zeros that kernels hold pointers into. NumPy has their address only: no array over them can be resized."""

    __slots__ = ("__array_interface__", "_owned")

    def __init__(self, nbytes: int) -> None:
        try:
            self._owned = np.zeros(nbytes, np.uint8)
        except ValueError as error:  # more than an address can say
            raise MemoryError(f"{counted(nbytes, 'byte')} of host memory") from error
        self.__array_interface__ = {**self._owned.__array_interface__, "strides": None}


def aligned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Aligned host memory, uint8[nbytes] of zeros; no array that ``base`` leads to owns it, or can be resized."""
    memory: npt.NDArray[np.uint8] = np.asarray(_Owner(nbytes + ALIGNMENT))
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def zeros(shape: int | tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """``numpy.zeros`` in such memory, for what kernels hold pointers into."""
    wanted = np.dtype(dtype)
    return aligned_bytes(int(np.prod(shape, dtype=np.int64)) * wanted.itemsize).view(wanted).reshape(shape)


def pinned_bytes(nbytes: int, device: str, lower: str) -> npt.NDArray[np.uint8]:
    """Aligned host memory, uint8[nbytes] of zeros, that ``device`` copies from asynchronously: pinned for CUDA.

    Raises MemoryError where it cannot be allocated; its text says to ``lower`` the arguments named there.
    """
    import torch

    try:
        memory = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=device.startswith("cuda"))
    except RuntimeError as error:
        raise MemoryError(
            f"arenas: no {counted(nbytes, 'byte')} of pinned host memory ({error}); lower {lower}"
        ) from error
    array: npt.NDArray[np.uint8] = memory.numpy()
    start = -memory.data_ptr() % ALIGNMENT
    return array[start : start + nbytes]  # a view: it keeps the pinned memory


def device_bytes(nbytes: int, device: str) -> Any:
    """A tensor uint8[nbytes] of zeros on ``device``, which can be written in and outside of inference mode."""
    import torch

    return device_zeros(nbytes, torch.uint8, device)


def device_zeros(shape: int | tuple[int, ...], dtype: Any, device: Any) -> Any:
    """A tensor of zeros on ``device`` of which steps show parts, and which can be written in and outside of inference
    mode.
    """
    import torch

    with torch.inference_mode(False):  # steps are written in that mode and outside of it
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    return of_fixed_size(tensor)


class Readers:
    """Whether the device has read each of ``count`` blocks of host memory: an event per block, recorded after its copy.

    Without CUDA a copy is complete when it returns, and nothing is waited for.
    """

    def __init__(self, device: str, count: int) -> None:
        self._torch: Any = None
        if device.startswith("cuda"):
            import torch

            self._torch = torch
        self._events: list[Any] = [None] * count

    def record(self, block: int, stream: Any = None) -> None:
        """Marks the end of the copies out of a block, on ``stream`` (None: the current one)."""
        if self._torch is None:
            return
        event = self._events[block]
        if event is None:
            event = self._events[block] = self._torch.cuda.Event()
        if stream is None:
            event.record()
        else:
            event.record(stream)

    def wait(self, block: int) -> None:
        """Waits until the copies out of a block are complete; returns at once where there were none."""
        event = self._events[block]
        if event is not None and not event.query():
            event.synchronize()
