"""``merge_attention`` of parts that lie in one buffer, in one launch: what a layer of a captured step has time for."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    outputs, lses, merged, merged_lse, part, lse_part, heads, token_stride, head_stride,
    ranks: tl.constexpr, size: tl.constexpr, size_up: tl.constexpr,
):  # fmt: skip
    """A program for each token and head: row ``row`` of (ranks, tokens * heads, size), ``part`` elements apart."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, size_up)
    inside = column < size
    minus_infinity = float("-inf")
    peak = minus_infinity
    for number in tl.static_range(ranks):
        rank = tl.full((), number, tl.int64)  # parts are together beyond int32 sooner than each is
        lse = tl.load(lses + rank * lse_part + row)
        # Infinite of either sign: no key. NaN is kept: it shall show in the output.
        peak = tl.where(lse > peak, tl.where(lse == float("inf"), peak, lse), peak)
    base = tl.where(peak == minus_infinity, 0.0, peak)
    total = 0.0
    found = tl.zeros((size_up,), dtype=tl.float32)
    for number in tl.static_range(ranks):
        rank = tl.full((), number, tl.int64)
        lse = tl.load(lses + rank * lse_part + row)
        weight = tl.exp(tl.where(lse == float("inf"), minus_infinity, lse) - base)
        total += weight
        numbers = tl.load(outputs + rank * part + row * size + column, mask=inside, other=0.0).to(tl.float32)
        # What the output of a part without keys holds is not looked at.
        found += tl.where(weight == 0.0, 0.0, numbers * weight)
    found = tl.where(total == 0.0, 0.0, found / total)
    place = merged + row // heads * token_stride + row % heads * head_stride + column
    tl.store(place, found.to(merged.dtype.element_ty), mask=inside)
    tl.store(merged_lse + row, base + tl.log(total))


def merge(outputs: Tensor, lses: Tensor, merged: Tensor) -> Tensor:
    """Merges ``outputs`` (ranks, tokens, heads, size) by ``lses``, float32 (ranks, tokens, heads), into ``merged``.

    The parts of one rank are contiguous, ``merged`` (tokens, heads, size) in its last dimension. Returns the merged
    log-sum-exp, float32 (tokens, heads): -inf where no rank has a key; the output is 0 there. One launch, which waits
    for nothing; all on one device.
    """
    ranks, tokens, heads, size = outputs.shape
    lse: Tensor = torch.empty((tokens, heads), dtype=torch.float32, device=outputs.device)
    launch: Any = _merge[tokens * heads,]
    launch(
        outputs, lses, merged, lse, outputs.stride(0), lses.stride(0), heads, merged.stride(0), merged.stride(1),
        ranks=ranks, size=size, size_up=triton.next_power_of_2(size),
    )  # fmt: skip
    return lse
