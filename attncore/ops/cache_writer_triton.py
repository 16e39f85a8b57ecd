"""The Triton kernel that stores a step's keys and values in a paged cache. Portable: it compiles for CUDA and ROCm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attncore.kernels.prepared_launch import prepared_launch
from attncore.ops.cache_writer_checks import are_one, check_addresses, check_tensors


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    new, cache, scale, token, block, offset, new_token, new_head, cache_block, cache_offset, cache_head,
    largest: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, heads_up: tl.constexpr, size_up: tl.constexpr,
    scales: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, heads_up)[:, None]
    column = tl.arange(0, size_up)[None, :]
    inside = (head < heads) & (column < size)
    head_at = head.to(tl.int64) if wide else head
    numbers = tl.load(new + token * new_token + head_at * new_head + column, mask=inside)
    if largest > 0:
        numbers = numbers.to(tl.float32)
        if scales == 0:
            numbers = numbers / scale
        elif scales == 1:
            numbers = numbers / tl.load(scale)
        else:
            numbers = numbers / tl.load(scale + head, mask=head < heads, other=1.0)
        numbers = tl.minimum(tl.maximum(numbers, -largest), largest)
    place = cache + block * cache_block + offset * cache_offset + head_at * cache_head + column
    tl.store(place, numbers.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def store_both(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, slots, k_scale, v_scale,
    key_token, key_head, value_token, value_head, key_block, key_offset, key_cache_head,
    value_block, value_offset, value_cache_head, num_slots,
    block_size: tl.constexpr, largest: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, size_v: tl.constexpr,
    heads_up: tl.constexpr, size_up: tl.constexpr, size_v_up: tl.constexpr,
    k_scales: tl.constexpr, v_scales: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The kernel of ``store``, a program a token. Public for those who compile it ahead; ``store`` launches it.

    ``k_scales``, ``v_scales``: 0 where the scale is a number, 1 where it is a pointer to one, 2 to one for each head.
    ``wide``: whether the last head is more elements from the first than int32 holds, as in a view of a large pool in
    which heads are outermost.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        block, offset = slot // block_size, slot % block_size
        _store(key, key_cache, k_scale, token, block, offset, key_token, key_head, key_block, key_offset,
               key_cache_head, largest, heads, size, heads_up, size_up, k_scales, wide)  # fmt: skip
        _store(value, value_cache, v_scale, token, block, offset, value_token, value_head, value_block, value_offset,
               value_cache_head, largest, heads, size_v, heads_up, size_v_up, v_scales, wide)  # fmt: skip


def store(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, k_scale: Any, v_scale: Any,
    largest: float, launches: dict[Any, Any] | None = None,
) -> None:  # fmt: skip
    """One launch for keys and values of ``len(slot_mapping)`` tokens; slots that the cache lacks are skipped.

    ``largest``: what the cache holds at most, where numbers are to be divided by the scales and cut off; 0 elsewhere.
    ``k_scale`` and ``v_scale`` are floats, or float32 tensors that the kernel reads. ``launches`` is the caller's, for
    these scales alone, empty at first: how to launch what was compiled, for tensors of the same kind. Triton's own
    search for it costs a step of many layers more than the launch does.
    """
    num_tokens = slot_mapping.shape[0]
    if not num_tokens:
        return
    try:
        at = key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr()
        kind = _kind_of(key, value, key_cache, value_cache, slot_mapping, at)
        known = launches.get(kind) if launches else None
    except Exception:  # no tensor, or a sparse one, which has none of these
        check_tensors(key, value, key_cache, value_cache, slot_mapping)
        raise
    if known is not None:
        launch, others = known
        launch(num_tokens, 1, *at, *others)
        return
    check_addresses(
        key, value, key_cache, value_cache, slot_mapping, one_scale=are_one(k_scale, v_scale, largest)
    )  # fmt: skip
    num_blocks, block_size, heads, size = key_cache.shape
    size_v = value_cache.shape[3]
    apart = max(key.stride(1), value.stride(1), key_cache.stride(2), value_cache.stride(2))
    others = (
        k_scale, v_scale, key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride()[:3],
        *value_cache.stride()[:3], num_blocks * block_size, block_size, largest, heads, size, size_v,
        triton.next_power_of_2(heads), triton.next_power_of_2(size), triton.next_power_of_2(size_v), _scales(k_scale),
        _scales(v_scale), (heads - 1) * apart >= 2**31,
    )  # fmt: skip
    compiled = store_both[(num_tokens,)](key, value, key_cache, value_cache, slot_mapping, *others)
    if launches is not None and compiled is not None:  # the interpreter compiles nothing
        # Its trial stores the first token again.
        launches[kind] = prepared_launch(compiled, slot_mapping.get_device(), *at, *others), others


class StoreInto:
    """``store`` into the same caches, call after call: of what is known of them no more than their addresses is asked.

    ``writer``, a CacheWriter whose ``launches`` are given, checks and stores the first tokens of every kind. The caches
    are taken as they are now.
    """

    def __init__(
        self, writer: Callable[..., None], key_cache: Tensor, value_cache: Tensor, launches: dict[Any, Any]
    ) -> None:
        # Tensors of our own: a caller's may be given another shape in place.
        self._writer, self._caches, self._of_writer = writer, (key_cache.detach(), value_cache.detach()), launches
        self._launches: dict[Any, Any] = {}

    def __call__(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        keys, values = self._caches
        kind: Any = None
        if type(key) is Tensor and type(value) is Tensor and type(slot_mapping) is Tensor:
            try:
                (num_slots,), (num_tokens, heads, size) = slot_mapping.shape, key.shape
                key_at, cache_at, value_cache_at = key.data_ptr(), keys.data_ptr(), values.data_ptr()
                slots_at = slot_mapping.data_ptr()
                kind = (
                    heads, size, key.dtype, key.stride(), key.device, key_at & 15, slot_mapping.dtype,
                    slot_mapping.stride(), slot_mapping.device, slots_at & 15, cache_at, value_cache_at,
                )  # fmt: skip
                value_at, num_values = key_at, num_tokens
                if value is not key:
                    num_values, heads, size = value.shape
                    value_at = value.data_ptr()
                    kind += heads, size, value.dtype, value.stride(), value.device, value_at & 15, key_at == value_at
            except (ValueError, RuntimeError):  # another number of dimensions, or a sparse tensor: the writer says so
                kind = None
        known = self._launches.get(kind)
        if known is not None and num_tokens >= num_slots <= num_values:
            if num_slots:
                launch, others = known
                launch(num_slots, 1, key_at, value_at, cache_at, value_cache_at, slots_at, *others)
            return
        self._writer(key, value, keys, values, slot_mapping)
        if kind is not None and num_slots:
            at = key_at, value_at, cache_at, value_cache_at, slots_at
            known = self._of_writer.get(_kind_of(key, value, keys, values, slot_mapping, at))
            if known is not None:
                self._launches[kind] = known


def _kind_of(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, at: tuple[int, int, int, int, int]
) -> tuple[Any, ...]:
    """All on which Triton specialises, and that check_addresses reads: types, dtypes, strides, devices, whether the
    addresses ``at`` are multiples of 16, and how far the caches lie apart. Only what may be cut off from its memory is
    not asked again.
    """
    key_at, value_at, cache_at, value_cache_at, slots_at = at
    return (
        key.dtype, value.dtype, slot_mapping.dtype, key_cache.dtype, key.stride(), value.stride(),
        key_cache.stride(), value_cache.stride(), cache_at & 15, value_cache_at - cache_at, key_at & 15,
        value_at & 15, key_at == value_at, slots_at & 15, key_cache.shape, value_cache.shape,
        value_cache.dtype, slot_mapping.stride(), key.device, value.device, key_cache.device, value_cache.device,
        slot_mapping.device, type(key), type(value), type(slot_mapping), type(key_cache), type(value_cache),
    )  # fmt: skip


def _scales(scale: Any) -> int:
    return 0 if isinstance(scale, float) else 1 if scale.numel() == 1 else 2
