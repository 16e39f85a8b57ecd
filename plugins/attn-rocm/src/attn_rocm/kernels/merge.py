"""The partial results of a launch whose keys were split, merged by log-sum-exp."""

# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_splits(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, out_token, out_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Programs (token, head). Parts are float32 (tokens, heads, splits, D), their log-sum-exp to base 2 (tokens, heads,
    splits); where that is -inf the part was not written, and is not read.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.arange(0, D)
    at = (token * HEADS + head) * SPLITS + split
    lse = tl.load(part_lse_ptr + at)
    peak = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight, 0)
    part = tl.load(
        part_ptr + (at * D)[:, None] + d[None, :], mask=(weight > 0)[:, None] & (d < SIZE)[None, :], other=0.0
    )
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + token * out_token + head * out_head + d, out.to(out_ptr.dtype.element_ty), mask=d < SIZE)
    if LSE:
        lse_sum = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + token * HEADS + head, lse_sum * 0.6931471805599453)
