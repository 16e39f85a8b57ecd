"""The Triton kernel that adds sinks to attention without. Portable: it compiles for CUDA and ROCm."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from attncore.kernels.prepared_launch import prepared_launch

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def scale_by_sinks(  # type: ignore[no-untyped-def]
    output, lse, sinks, num_tokens, output_token, output_head, lse_token, lse_head,
    base2: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, heads_up: tl.constexpr, size_up: tl.constexpr,
    wide: tl.constexpr,
):  # fmt: skip
    """A program a token; public for those who compile it ahead. ``wide``: as of the cache writer's kernel."""
    token = tl.program_id(0).to(tl.int64)
    if token < num_tokens:
        head = tl.arange(0, heads_up)
        is_head = head < heads
        head_at = head.to(tl.int64) if wide else head
        place = lse + token * lse_token + head_at * lse_head
        found = tl.load(place, mask=is_head, other=0.0)
        sink = tl.load(sinks + head, mask=is_head, other=0.0) * LOG2_E
        unit = 1.0 if base2 else LOG2_E
        has_keys = tl.abs(found) != float("inf")  # what is no number stays so
        total = found * unit
        peak = tl.where(has_keys, tl.maximum(total, sink), sink)
        of_keys = tl.where(has_keys, tl.exp2(total - peak), 0.0)
        both = of_keys + tl.exp2(sink - peak)
        share = of_keys / both
        column = tl.arange(0, size_up)
        inside = is_head[:, None] & (column[None, :] < size)
        numbers = output + token * output_token + head_at[:, None] * output_head + column[None, :]
        scaled = tl.load(numbers, mask=inside, other=0.0).to(tl.float32) * share[:, None]
        scaled = tl.where(share[:, None] == 0.0, 0.0, scaled)
        tl.debug_barrier()  # several threads read a logarithm: none is written before all have read
        tl.store(place, (peak + tl.log2(both)) / unit, mask=is_head)
        tl.store(numbers, scaled.to(output.dtype.element_ty), mask=inside)


def add_sinks(output: Any, lse: Any, sinks: Any, base2: bool, launches: dict[Any, Any]) -> None:
    """One launch; ``launches`` is the caller's, empty at first: how to launch what was compiled, by kind."""
    num_tokens, heads, size = output.shape
    if not num_tokens:
        return
    at = output.data_ptr(), lse.data_ptr(), sinks.data_ptr()
    kind = (
        output.dtype, output.stride(), lse.stride(), at[0] & 15, at[1] & 15, at[2] & 15, size, output.device,
    )  # fmt: skip
    strides = output.stride(0), output.stride(1), lse.stride(0), lse.stride(1)
    sizes = heads, size, triton.next_power_of_2(heads), triton.next_power_of_2(size)
    fixed = (*strides, base2, *sizes, (heads - 1) * max(strides[1], strides[3]) >= 2**31)
    known = launches.get(kind)
    if known is not None:
        known(num_tokens, 1, *at, num_tokens, *fixed)
        return
    compiled = scale_by_sinks[(num_tokens,)](output, lse, sinks, num_tokens, *fixed)
    if compiled is not None:  # the interpreter compiles nothing; the trial of no token writes nothing
        launches[kind] = prepared_launch(compiled, output.get_device(), *at, 0, *fixed)
