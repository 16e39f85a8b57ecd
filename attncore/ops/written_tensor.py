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
    check_own_elements(name, tensor)
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: made in torch.inference_mode(), and outside of it not to be written to")
    owner = tensor if tensor._base is None else tensor._base
    if owner.requires_grad and owner.is_leaf and torch.is_grad_enabled():
        raise ValueError(f"{name}: it requires a gradient, so that torch refuses to write to it; use torch.no_grad()")


def check_own_elements(name: str, tensor: Tensor) -> None:
    """ValueError where elements of a strided tensor share memory."""
    if tensor.numel() and not _apart(tensor):
        raise ValueError(
            f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} found, an expanded tensor or one whose "
            "elements share memory; give one that has its own"
        )


def overwrites(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *, one_scale: bool = True) -> bool:
    """Whether values would overwrite keys: where the caches share memory, unless values are the first columns of the
    keys in it as in what is written, as those of a latent cache are. ``one_scale``: both are times the same number.
    """
    one = one_scale and _are_columns(value, key) and _are_columns(value_cache, key_cache)
    return not one and share_memory(key_cache, value_cache)


def _are_columns(part: Tensor, whole: Tensor) -> bool:
    return (
        part.data_ptr() == whole.data_ptr()
        and part.dtype == whole.dtype
        and part.stride() == whole.stride()
        and part.shape[-1] <= whole.shape[-1]
    )


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, each of own elements of one size, have an element in common.

    Where their strides differ, so that one's elements lie between those of the other in another order, all that lies
    between their ends counts as theirs.
    """
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    axes = []
    for step, other_step, count, most in zip(one.stride(), other.stride(), one.shape, other.shape, strict=True):
        if count > 1 or most > 1:  # of a single element the step says nothing
            axes.append((step if count > 1 else other_step, other_step if most > 1 else step, count, most))
    apart, rest = divmod(other.data_ptr() - one.data_ptr(), one.itemsize)
    return any(_meet(apart + more, sorted(axes, reverse=True)) for more in range(1 + bool(rest)))


def _meet(apart: int, axes: list[tuple[int, int, int, int]]) -> bool:
    """Whether elements meet that begin ``apart`` from each other and are repeated along ``axes``, the largest step
    first: the step and the number of steps of either.
    """
    reach = 1 + sum(step * (count - 1) for step, _, count, _ in axes)
    other_reach = 1 + sum(step * (count - 1) for _, step, _, count in axes)
    if not -other_reach < apart < reach:
        return False
    if not axes or axes[0][0] != axes[0][1]:
        return True
    (step, _, count, other_count), *inner = axes
    reach, other_reach = reach - step * (count - 1), other_reach - step * (other_count - 1)
    first, last = -((apart + other_reach - 1) // step), (reach - apart - 1) // step  # three at most
    moves = range(max(first, 1 - count), min(last, other_count - 1) + 1)
    return any(_meet(apart + moved * step, inner) for moved in moves)


def _apart(tensor: Tensor) -> bool:
    """Whether each stride passes all that the smaller ones reach, as in every order of axes and in slices of them."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
