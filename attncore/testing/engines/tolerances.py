"""How far a backend's output may lie from dense float32 attention, by dtype.

Inputs are of order one. The numbers leave room for the rounding of the output and of the weights before they meet the
values, as kernels do it; reading one key too many or too few is off by a hundred times as much.
"""

from __future__ import annotations

from collections.abc import Mapping

TOLERANCES: Mapping[str, float] = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "fp8": 8e-2}
"""Allowed: the number times ``1 + abs(expected)``. ``fp8`` counts where the cache is fp8: a kernel may round its
weights and queries so.
"""


def tolerance(dtype: str, kv_cache_dtype: str = "auto") -> float:
    """The tolerance of a backend's configuration: the widest of its dtypes."""
    if kv_cache_dtype.startswith("fp8"):
        return TOLERANCES["fp8"]
    return max(TOLERANCES[dtype], TOLERANCES.get(kv_cache_dtype, 0.0) if kv_cache_dtype != "auto" else 0.0)
