"""What can be written to in place: asked before anything is written, so that a call that is refused changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from attncore.array_arguments import not_strided


def check_strided(name: str, tensor: Tensor) -> None:
    """ValueError where a tensor is none of addresses and strides, such as a sparse one, or they lead elsewhere."""
    why = not_strided(tensor)
    if why is not None:
        raise ValueError(f"{name}: {why}")


def check_written(name: str, tensor: Tensor) -> None:
    """ValueError where torch would refuse to write to ``tensor``, or where its elements share memory."""
    check_strided(name, tensor)
    if tensor.numel() and not _apart(tensor):
        raise ValueError(
            f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} found, an expanded tensor or one whose "
            "elements share memory; give one that has its own"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: made in torch.inference_mode(), and outside of it not to be written to")
    owner = tensor if tensor._base is None else tensor._base
    if owner.requires_grad and owner.is_leaf and torch.is_grad_enabled():
        raise ValueError(f"{name}: it requires a gradient, so that torch refuses to write to it; use torch.no_grad()")


def _apart(tensor: Tensor) -> bool:
    """Whether each stride passes all that the smaller ones reach, as in every order of axes and in slices of them."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
