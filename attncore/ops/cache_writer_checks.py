"""What a cache writer is handed, as tensors that kernels read and write by address: checked before they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attncore.array_arguments import not_by_address
from attncore.ops.written_tensor import check_own_elements, overwrites
from attncore.show import counted

NAMES = ("key", "value", "key_cache", "value_cache", "slot_mapping")


def check_tensors(
    *given: Any, names: Sequence[str] = NAMES, why_not: Callable[[Any], str | None] = not_by_address
) -> None:
    """TypeError or ValueError that names the first of ``names`` which is no tensor, or of which ``why_not`` says why it
    cannot be read; by default, why not by its address.
    """
    for name, tensor in zip(names, given, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {type(tensor).__name__} found; give a torch tensor on the cache's device")
        why = why_not(tensor)
        if why is not None:
            raise ValueError(f"{name}: {why}")


def check_slots(slot_mapping: Tensor) -> None:
    """ValueError unless ``slot_mapping`` is int64, one slot a token."""
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping: {slot_mapping.dtype} {tuple(slot_mapping.shape)} found; give int64, one slot a token"
        )


def check_pair(name: str, key_cache: Tensor, value_cache: Tensor) -> None:
    """ValueError unless both caches have the same blocks, heads and dtype. ``name`` is the argument of the values."""
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"{name}: {value_cache.dtype} {tuple(value_cache.shape)} found beside keys of {key_cache.dtype} "
            f"{tuple(key_cache.shape)}"
        )


def check_devices(*given: Tensor, names: Sequence[str] = NAMES) -> None:
    """ValueError that names the first tensor which is not on the device of the last, ``slot_mapping``."""
    device = given[-1].device
    for name, tensor in zip(names, given, strict=True):
        if tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}, but slot_mapping is on {device}")


def check_last_slot(slot_mapping: Tensor, cache: Tensor) -> None:
    """IndexError where a slot is past the end of ``cache``. It reads the slots: for those on a CPU."""
    num_blocks, block_size = cache.shape[:2]
    if len(slot_mapping) and int(slot_mapping.max()) >= num_blocks * block_size:
        raise IndexError(
            f"slot_mapping: slot {int(slot_mapping.max())} is past the end of a cache of "
            f"{counted(num_blocks, 'block')} of "
            f"{counted(block_size, 'token')}; tell the batch num_blocks, or give the cache more"
        )


def check_addresses(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *, one_scale: bool
) -> None:
    """ValueError where kernels, which take last dimensions as contiguous and one device, would go astray, or where
    values would overwrite keys. ``one_scale``: whether both caches hold numbers times the same.
    """
    given = key, value, key_cache, value_cache, slot_mapping
    check_tensors(*given)
    for name, tensor in zip(NAMES, given, strict=True):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: stride {tensor.stride(-1)} in its last dimension; give one that is contiguous")
    check_devices(*given)
    if slot_mapping.dtype != torch.int64 or value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"slot_mapping: {slot_mapping.dtype} for caches of {key_cache.dtype} and {value_cache.dtype}; give int64, "
            "and caches of one dtype"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_own_elements(name, cache)
    if overwrites(key, value, key_cache, value_cache, one_scale=one_scale):
        raise ValueError(
            "value_cache: it shares memory with key_cache, so that values would overwrite keys; give each its own, or "
            "values that are the first columns of the keys for a cache in which they are"
        )


def are_one(k_scale: float | Tensor, v_scale: float | Tensor, largest: float) -> bool:
    """Whether both caches hold numbers times the same: where they hold at most ``largest``, 0 without scales.

    A tensor, which may lie on a device and change, is not read: two that are not one object count as different.
    """
    if not largest or k_scale is v_scale:
        return True
    return isinstance(k_scale, float) and isinstance(v_scale, float) and k_scale == v_scale
