"""Sinks for kernels that have none: an output is scaled by what the sink would have taken of its softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attncore.ops.written_tensor import check_own_elements, check_written
from attncore.show import counted

LOG2_E = math.log2(math.e)


class SinksByLse:
    """Adds a layer's sinks to attention that was computed without: ``output`` and ``lse`` become those with sinks.

    A sink is a logit that joins the softmax and has no value, so that attention with sinks is attention without, times
    ``sum / (sum + exp(sink))``; ``lse`` is the logarithm of that sum. ``sinks`` float32 (num_heads,) on the device is
    read by every call, captured ones too. A call takes ``output`` (T, num_heads, value_size), whose last dimension is
    contiguous, and ``lse`` float32 (T, num_heads) with any strides, natural or, with ``base2``, to base 2, and writes
    to both. Infinite of either sign, a logarithm says that the row had no key: its output is 0, and its logarithm the
    sink's. On a GPU it is one launch, which may be captured and waits for nothing; the product is of float32, rounded
    once to the output's dtype. No gradient is kept.

    Raises ValueError naming the argument, before anything is written, where shapes, dtypes, devices or strides are
    others, or a tensor cannot be written to; TypeError for what is no tensor.
    """

    def __init__(self, sinks: Tensor, *, base2: bool = False) -> None:
        self.sinks, self.base2 = _tensor("sinks", sinks), base2
        if sinks.dim() != 1 or sinks.dtype != torch.float32 or not sinks.is_contiguous():
            raise ValueError(
                f"sinks: {sinks.dtype} of shape {tuple(sinks.shape)} and strides {sinks.stride()} found; give float32 "
                "(num_heads,), contiguous"
            )
        self._checked: tuple[Any, ...] = ()
        self._launches: dict[Any, Any] = {}

    def __call__(self, output: Tensor, lse: Tensor) -> None:
        formats: Any
        try:
            formats = (
                output.shape, lse.shape, output.dtype, lse.dtype, output.stride(), lse.stride(), output.device,
                lse.device,
            )  # fmt: skip
        except (AttributeError, RuntimeError):  # no tensor, or a sparse one
            formats = None
        if formats != self._checked:
            self._check(output, lse)
            self._checked = formats
        if output.is_cuda:
            from attncore.ops.sinks_by_lse_triton import add_sinks

            add_sinks(output, lse, self.sinks, self.base2, self._launches)
            return
        unit = LOG2_E if self.base2 else 1.0
        with torch.no_grad():
            check_written("output", output)
            check_written("lse", lse)  # what torch would refuse, perhaps after the output is written
            sinks = (self.sinks * unit).expand(lse.shape)
            sums = torch.where(lse.isinf(), -torch.inf, lse)
            joined = torch.logaddexp2(sums, sinks) if self.base2 else torch.logaddexp(sums, sinks)
            share = (torch.exp2 if self.base2 else torch.exp)(sums - joined).unsqueeze(-1)
            output.copy_(torch.where(share == 0, 0.0, output.float() * share))
            lse.copy_(joined)

    def _check(self, output: Any, lse: Any) -> None:
        output, lse = _tensor("output", output), _tensor("lse", lse)
        heads = len(self.sinks)
        if output.dim() != 3 or output.shape[1] != heads or not output.is_floating_point() or output.stride(2) != 1:
            raise ValueError(
                f"output: {output.dtype} of shape {tuple(output.shape)} and strides {output.stride()} found; give "
                f"floats (tokens, {counted(heads, 'head')}, value_size), contiguous in the last dimension"
            )
        if lse.shape != output.shape[:2] or lse.dtype != torch.float32:
            raise ValueError(
                f"lse: {lse.dtype} of shape {tuple(lse.shape)} found; give float32 {tuple(output.shape[:2])}, as the "
                "output has"
            )
        for name, tensor in (("output", output), ("lse", lse)):
            if tensor.device != self.sinks.device:
                raise ValueError(f"{name}: on {tensor.device}, but the sinks are on {self.sinks.device}")
            check_own_elements(name, tensor)


def _tensor(name: str, value: Any) -> Tensor:
    from attncore.array_arguments import not_strided

    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {type(value).__name__} found; give a tensor")
    if (why := not_strided(value)) is not None:
        raise ValueError(f"{name}: {why}")
    return value
