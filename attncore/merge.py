"""Attention over parts of the keys, merged into attention over all of them by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attncore.arguments import flag

if TYPE_CHECKING:
    from torch import Tensor


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor], *, base2: bool = False) -> tuple[Tensor, Tensor]:
    """Merges partial outputs of the same queries over disjoint sets of keys; returns output and log-sum-exp.

    ``outputs[i]`` is (num_tokens, num_heads, value_size), any float dtype; ``lses[i]`` (num_tokens, num_heads), the
    logarithm of the softmax's sum of that part: natural, or to base 2 with ``base2`` (FlashInfer). Infinite of either
    sign, it says that the part held no key (kernels differ in the sign); what the output then holds is not looked at.
    Sinks belong in one part only. Arithmetic and the merged logarithm (same base) are float32; the merged output has
    the dtype of ``outputs[0]``. Where no part held a key, the output is 0 and the logarithm -inf. Where a logarithm
    is NaN, both are. A float64 logarithm beyond float32's range is merged as what it is; the merged one is then the
    largest number of float32. One device; nothing synchronises.
    """
    import torch

    base2 = flag("base2", base2)
    _check(outputs, lses)
    # Of float64 they are compared as such, for float32 has infinity for the largest, which would say "no key".
    wide = torch.float64 if any(lse.dtype == torch.float64 for lse in lses) else torch.float32
    parts = torch.stack([lse.to(wide) for lse in lses])
    parts = torch.where(parts.isinf(), -torch.inf, parts)
    peak = parts.amax(dim=0)
    peak = torch.where(peak.isinf(), 0.0, peak)  # no part held a key: -inf less -inf is no number
    shifted = (parts - peak).float()
    weights = torch.exp2(shifted) if base2 else torch.exp(shifted)
    total = weights.sum(dim=0)
    merged = torch.zeros(outputs[0].shape, dtype=torch.float32, device=outputs[0].device)
    for output, weight in zip(outputs, weights, strict=True):
        share = (weight / total.clamp_min(torch.finfo(torch.float32).tiny)).unsqueeze(-1)
        merged += torch.where(share == 0, 0.0, output.float() * share)  # a share that is no number shows
    lse = peak + (torch.log2(total) if base2 else torch.log(total))
    if wide is torch.float64:
        most = torch.finfo(torch.float32).max
        lse = torch.where(lse.isinf(), lse, lse.clamp(-most, most)).float()
    return merged.to(outputs[0].dtype), lse


def _check(outputs: Any, lses: Any) -> None:
    from torch import Tensor

    from attncore.array_arguments import not_strided  # it imports NumPy

    for name, values in (("outputs", outputs), ("lses", lses)):
        if isinstance(values, Tensor):
            if (why := not_strided(values)) is not None:
                raise ValueError(f"{name}: {why}")
            if not values.dim():
                raise ValueError(f"{name}: a tensor of no dimensions found; give a list of tensors, one for each part")
        elif not isinstance(values, Sequence):  # parts that are stacked are given as one tensor
            raise TypeError(f"{name}: {type(values).__name__} found; give a list of tensors, one for each part")
    if not len(outputs):
        raise ValueError("outputs: empty; give at least one part")
    if len(lses) != len(outputs):
        raise ValueError(f"lses: {len(lses)} for {len(outputs)} outputs; give one each")
    for name, values in (("outputs", outputs), ("lses", lses)):
        for index, value in enumerate(values):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}[{index}]: {type(value).__name__} found; give a tensor")
            if (why := not_strided(value)) is not None:
                raise ValueError(f"{name}[{index}]: {why}")
    first = outputs[0]
    for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.dim() != 3 or not output.is_floating_point() or output.shape != first.shape:
            raise ValueError(
                f"outputs[{index}]: {output.dtype} of shape {tuple(output.shape)} found; give floats (num_tokens, "
                f"num_heads, value_size), all of one shape, the first's being {tuple(first.shape)}"
            )
        if lse.shape != output.shape[:2] or not lse.is_floating_point():
            raise ValueError(
                f"lses[{index}]: {lse.dtype} of shape {tuple(lse.shape)} found; its output has (num_tokens, num_heads) "
                f"{tuple(output.shape[:2])}"
            )
        for name, tensor in ((f"outputs[{index}]", output), (f"lses[{index}]", lse)):
            if tensor.device != first.device:
                raise ValueError(f"{name}: on {tensor.device}, but outputs[0] is on {first.device}")
