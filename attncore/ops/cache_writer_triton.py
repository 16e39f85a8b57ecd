"""The Triton kernel that stores a step's keys and values in a paged cache. Portable: it compiles for CUDA and ROCm."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    new, cache, scale, token, block, offset, new_token, new_head, cache_block, cache_offset, cache_head,
    largest: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, heads_up: tl.constexpr, size_up: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, heads_up)[:, None]
    column = tl.arange(0, size_up)[None, :]
    inside = (head < heads) & (column < size)
    numbers = tl.load(new + token * new_token + head * new_head + column, mask=inside)
    if largest > 0:
        numbers = numbers.to(tl.float32) / scale
        numbers = tl.minimum(tl.maximum(numbers, -largest), largest)
    place = cache + block * cache_block + offset * cache_offset + head * cache_head + column
    tl.store(place, numbers.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def store_both(  # type: ignore[no-untyped-def]
    key, value, key_cache, value_cache, slots, k_scale, v_scale,
    key_token, key_head, value_token, value_head, key_block, key_offset, key_cache_head,
    value_block, value_offset, value_cache_head,
    block_size: tl.constexpr, largest: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, size_v: tl.constexpr,
    heads_up: tl.constexpr, size_up: tl.constexpr, size_v_up: tl.constexpr,
):  # fmt: skip
    """The kernel of ``store``, a program a token. Public for those who compile it ahead; ``store`` launches it."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        _store(key, key_cache, k_scale, token, block, offset, key_token, key_head, key_block, key_offset,
               key_cache_head, largest, heads, size, heads_up, size_up)  # fmt: skip
        _store(value, value_cache, v_scale, token, block, offset, value_token, value_head, value_block, value_offset,
               value_cache_head, largest, heads, size_v, heads_up, size_v_up)  # fmt: skip


def store(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, k_scale: float, v_scale: float,
    largest: float, launches: dict[Any, Any] | None = None,
) -> None:  # fmt: skip
    """One launch for keys and values of ``len(slot_mapping)`` tokens; negative slots are skipped.

    ``largest``: what the cache holds at most, where numbers are to be divided by the scales and cut off; 0 elsewhere.
    ``launches`` is the caller's, empty at first: what was compiled, for tensors of the same kind. Triton's own search
    for it costs a step of many layers more than the launch does.
    """
    num_tokens = slot_mapping.shape[0]
    if not num_tokens:
        return
    # All on which Triton specialises: dtypes, strides, and whether addresses are multiples of 16.
    kind = (
        key.dtype, value.dtype, slot_mapping.dtype, key_cache.dtype, key.stride(), value.stride(), key_cache.stride(),
        value_cache.stride(), key_cache.data_ptr() & 15, value_cache.data_ptr() & 15, key.data_ptr() & 15,
        value.data_ptr() & 15, slot_mapping.data_ptr() & 15, key_cache.shape[1:], value_cache.shape[3],
        key.device.index,
    )  # fmt: skip
    known = launches.get(kind) if launches else None
    if known is not None:
        compiled, others = known
        compiled[(num_tokens, 1, 1)](key, value, key_cache, value_cache, slot_mapping, *others)
        return
    _, block_size, heads, size = key_cache.shape
    size_v = value_cache.shape[3]
    others = (
        k_scale, v_scale, key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride()[:3],
        *value_cache.stride()[:3], block_size, largest, heads, size, size_v, triton.next_power_of_2(heads),
        triton.next_power_of_2(size), triton.next_power_of_2(size_v),
    )  # fmt: skip
    compiled = store_both[(num_tokens,)](key, value, key_cache, value_cache, slot_mapping, *others)
    if launches is not None and compiled is not None:  # the interpreter compiles nothing
        launches[kind] = compiled, others
