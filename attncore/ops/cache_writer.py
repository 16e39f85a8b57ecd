"""Writing a step's keys and values into a paged cache, for backends whose library does not: any layout, fp8 too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attncore.abstract.scales import checked_scale
from attncore.ops.cache_writer_checks import (
    are_one,
    check_addresses,
    check_last_slot,
    check_pair,
    check_slots,
    check_tensors,
)
from attncore.ops.written_tensor import check_written
from attncore.show import counted

LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
"""What an fp8 cache holds at most: larger numbers are cut off, where a conversion may make them NaN or infinite."""


class CacheWriter:
    """Stores keys and values by slot mapping. ``k_scale`` and ``v_scale`` are what an fp8 cache's numbers are times:
    numbers, or float32 tensors on the device with one element or one for each head, read there by every call.

    A call takes ``key`` and ``value`` (T or more, num_kv_heads, head_size or head_size_v), the caches as views
    (blocks, block_size, num_kv_heads, head size) and ``slot_mapping`` int64 (T,), all on one device. Of each but the
    last only the last dimension has to be contiguous: a cache whose blocks hold heads first comes as
    ``cache.transpose(1, 2)``. A token of a negative slot is not written. On a GPU it is one launch, which may be
    captured and waits for nothing, and skips slots past the end too; on a CPU such a slot is an IndexError before
    anything is written. Numbers are converted to the cache's dtype; in fp8 (``LARGEST``) those beyond its range are cut
    off. No gradient is kept.

    Raises ValueError naming the argument, before anything is written, where shapes, devices or layouts disagree, where
    the caches share elements (unless ``value`` is the first columns of ``key`` in both), where a cache's floats of a
    byte are none of ``LARGEST``, or where a scale is no positive number of float32 and no such tensor; TypeError for
    what is no tensor.
    """

    def __init__(self, k_scale: float | Tensor = 1.0, v_scale: float | Tensor = 1.0) -> None:
        self.k_scale, self.v_scale = _scale("k_scale", k_scale), _scale("v_scale", v_scale)
        self._checked: tuple[Any, ...] = ()
        self._launches: dict[Any, Any] = {}

    def __call__(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        try:
            known = self._checked == _formats(key, value, key_cache, value_cache, slot_mapping)
        except Exception:  # no tensor, or one without a shape: ``_check`` says so
            known = False
        if not known:
            self._check(key, value, key_cache, value_cache, slot_mapping)
        if slot_mapping.is_cuda:
            from attncore.ops.cache_writer_triton import store

            largest = LARGEST.get(key_cache.dtype, 0.0)
            store(
                key, value, key_cache, value_cache, slot_mapping, self.k_scale, self.v_scale, largest, self._launches
            )  # fmt: skip
            return
        check_addresses(
            key, value, key_cache, value_cache, slot_mapping,
            one_scale=are_one(self.k_scale, self.v_scale, LARGEST.get(key_cache.dtype, 0.0)),
        )  # fmt: skip
        with torch.no_grad():  # as it is written to
            check_written("key_cache", key_cache)  # what torch would refuse, perhaps after the keys are written
            check_written("value_cache", value_cache)
        check_last_slot(slot_mapping, key_cache)
        block_size = key_cache.shape[1]
        (written,) = torch.where(slot_mapping >= 0)
        slots = slot_mapping[written]
        block, offset = torch.div(slots, block_size, rounding_mode="floor"), torch.remainder(slots, block_size)
        with torch.no_grad():  # as on a GPU; a cache that requires a gradient could not be written to
            converted = [
                _convert(key[written], key_cache.dtype, self.k_scale),
                _convert(value[written], value_cache.dtype, self.v_scale),
            ]
            for numbers, cache in zip(converted, (key_cache, value_cache), strict=True):
                if cache.dtype in LARGEST:  # torch indexes no fp8
                    cache.view(torch.uint8)[block, offset] = numbers.view(torch.uint8)
                else:
                    cache[block, offset] = numbers

    def into(self, key_cache: Tensor, value_cache: Tensor) -> Callable[[Tensor, Tensor, Tensor], None]:
        """``call(key, value, slot_mapping)``, which writes into the same caches time and again.

        It raises what a call of the writer raises. On a GPU it takes the host half as long: of the caches it asks no
        more than where they are. They are taken as they are now, so a layer whose cache is another tensor, or has other
        memory, makes another one.

        TypeError for caches that are no tensors.
        """
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            if not isinstance(cache, Tensor):
                raise TypeError(f"{name}: {type(cache).__name__} found; give a torch tensor")
        if not key_cache.is_cuda:
            return lambda key, value, slot_mapping: self(key, value, key_cache, value_cache, slot_mapping)
        from attncore.ops.cache_writer_triton import StoreInto

        return StoreInto(self, key_cache, value_cache, self._launches)

    def _check(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        check_tensors(key, value, key_cache, value_cache, slot_mapping)
        check_slots(slot_mapping)
        for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
            if cache.dim() != 4:
                raise ValueError(
                    f"{name}_cache: shape {tuple(cache.shape)} found; expected (blocks, block_size, num_kv_heads, "
                    "head size)"
                )
            if new.dim() != 3 or new.shape[1:] != cache.shape[2:]:
                raise ValueError(
                    f"{name}: shape {tuple(new.shape)} found; the cache holds heads and sizes {tuple(cache.shape[2:])}"
                )
            if len(new) < len(slot_mapping):
                raise ValueError(f"{name}: {counted(len(new), 'token')} found for {counted(len(slot_mapping), 'slot')}")
        check_pair("value_cache", key_cache, value_cache)
        if key_cache.dtype.is_floating_point and key_cache.dtype.itemsize == 1 and key_cache.dtype not in LARGEST:
            known = ", ".join(map(str, LARGEST))
            raise ValueError(f"key_cache: {key_cache.dtype} found; of the floats of a byte it may be one of {known}")
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if isinstance(scale, float):
                continue
            if scale.numel() not in (1, key_cache.shape[2]):
                raise ValueError(
                    f"{name}: {counted(scale.numel(), 'element')} found; the cache holds "
                    f"{counted(key_cache.shape[2], 'head')}"
                )
            if scale.device != slot_mapping.device:
                raise ValueError(f"{name}: on {scale.device}, but slot_mapping is on {slot_mapping.device}")
        self._checked = _formats(key, value, key_cache, value_cache, slot_mapping)


def _formats(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> Any:
    """What the checks depend on: shapes and dtypes."""
    return (
        key.shape, value.shape, key_cache.shape, value_cache.shape, slot_mapping.shape,
        key_cache.dtype, value_cache.dtype, slot_mapping.dtype,
    )  # fmt: skip


def _scale(name: str, value: Any) -> float | Tensor:
    scale = checked_scale(name, value)
    if not isinstance(scale, float) and (scale.dtype != torch.float32 or not scale.is_contiguous()):
        raise ValueError(f"{name}: {scale.dtype} with strides {scale.stride()} found; give contiguous float32")
    return scale


def _convert(numbers: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    if dtype in LARGEST:
        scale = scale if isinstance(scale, float) else scale.reshape(-1, 1)  # of all heads, or of each
        numbers = (numbers.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return numbers.to(dtype)
