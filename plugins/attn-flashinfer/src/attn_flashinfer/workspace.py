"""The memory that split contexts need: one buffer that all wrappers share, since they run one after another."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

INT_BYTES = 8 << 20
"""Device memory, and as much pinned host memory, that a wrapper of eager steps plans into."""


class Workspace:
    """``buffer``, uint8 on the device, and its growth up to ``limit`` bytes.

    A wrapper of a captured size keeps the buffer that it was made with, whose address its graph holds; wrappers of
    eager steps are moved to a larger one.
    """

    def __init__(self, device: str, nbytes: int, limit: int) -> None:
        self.device, self.limit = device, limit
        self._movable: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._nbytes = min(nbytes, limit)
        self._buffer: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        """The buffer, taken when it is first asked for."""
        if self._buffer is None:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
        return self._buffer

    def serve(self, wrapper: Any, int_buffer: Tensor) -> None:
        """From now on ``wrapper``, whose own buffer is ``int_buffer``, moves when the workspace grows."""
        wrapper.reset_workspace_buffer(self.buffer, int_buffer)
        self._movable[wrapper] = int_buffer

    def reserve(self, nbytes: int) -> None:
        """Makes the buffer at least so large; ValueError beyond the limit.

        A larger one waits for the device: steps that run use the old one, and plans in flight their staging.
        """
        if nbytes <= self._nbytes:
            return
        if nbytes > self.limit:
            raise ValueError(
                f"max_workspace_mib: the plan asks for {_mib(nbytes)} MiB, {_mib(self.limit)} are allowed; raise the "
                "option, or run smaller batches"
            )
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        larger = torch.empty(nbytes, dtype=torch.uint8, device=self.device)  # where there is no room, nothing changes
        self._nbytes, self._buffer = nbytes, larger
        for wrapper, int_buffer in list(self._movable.items()):
            wrapper.reset_workspace_buffer(larger, int_buffer)


def _mib(nbytes: int) -> int:
    return -(-nbytes >> 20)
