"""What ranks tell each other of a layer: output and log-sum-exp in one buffer, gathered by one collective, merged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attncore.merge import merge_attention

_ALIGNMENT = 16
"""Bytes: parts begin at multiples of what a kernel reads at once."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class Exchange:
    """A layer's part of one rank, in the buffer in which it is sent. Sizes follow from ``shape`` alone, and nothing
    synchronises, so that it can be captured in a CUDA graph.

    ``shape`` is that of an output (tokens, heads, value size) of ``dtype``. ``output`` and ``lse``, float32 (tokens,
    heads), are views of the buffer, to be filled.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: Any) -> None:
        self._shape, self._dtype = shape, dtype
        rows = shape[0] * shape[1]
        self._of_output, self._of_lse = rows * shape[2] * dtype.itemsize, rows * torch.float32.itemsize
        self._lse_at = _aligned(self._of_output)
        self._sent = torch.empty(
            max(_aligned(self._lse_at + self._of_lse), _ALIGNMENT), dtype=torch.uint8, device=device
        )
        self.output, self.lse = (views[0] for views in self._views(self._sent.unsqueeze(0)))

    @property
    def nbytes(self) -> int:
        """What a rank sends to each other one, bytes."""
        return self._sent.numel()

    def _views(self, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (ranks, tokens, heads, value size) and log-sum-exps (ranks, tokens, heads) of (ranks, bytes)."""
        outputs = buffers[:, : self._of_output].view(self._dtype)
        lses = buffers[:, self._lse_at : self._lse_at + self._of_lse].view(torch.float32)
        ranks = len(buffers)  # parts of several ranks are views too: a row of each is contiguous
        return outputs.view(ranks, *self._shape), lses.view(ranks, *self._shape[:2])

    def merged(self, group: Any, output: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output and log-sum-exp over the keys of all ranks of ``group``, the same bits on each of them.

        In ``output`` where that is given. One all-gather; RuntimeError of torch's where a rank is gone.
        """
        received = self._sent.new_empty((dist.get_world_size(group), self._sent.numel()))
        _all_gather(received.flatten(), self._sent, group=group)
        outputs, lses = self._views(received)
        if received.is_cuda and self._of_output:
            from attncore.ranks.merge_kernel import merge

            found = torch.empty(self._shape, dtype=self._dtype, device=received.device) if output is None else output
            return found, merge(outputs, lses, found)
        found, lse = merge_attention(outputs.unbind(), lses.unbind())
        return (found if output is None else output.copy_(found)), lse


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
