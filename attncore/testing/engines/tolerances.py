"""How far a backend's output may lie from dense float32 attention, by dtype.

Inputs are of order one. The numbers leave room for the rounding of the output and of the weights before they meet the
values, as kernels do it; reading one key too many or too few is off by a hundred times as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCES: Mapping[str, float] = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "fp8": 8e-2}
"""Allowed: the number times ``1 + abs(expected)``. ``fp8`` counts where the cache is fp8: a kernel may round its
weights and queries so.
"""
LSE_IN_16_BITS: Mapping[str, float] = {"float32": 0.0, "float16": 1e-3, "bfloat16": 2.0**-8}
"""What a log-sum-exp may be off where the inputs have 16 bits, beside float32's tolerance."""


def tolerance(dtype: str, kv_cache_dtype: str = "auto") -> float:
    """The tolerance of a backend's configuration: the widest of its dtypes."""
    if kv_cache_dtype.startswith("fp8"):
        return TOLERANCES["fp8"]
    return max(TOLERANCES[dtype], TOLERANCES.get(kv_cache_dtype, 0.0) if kv_cache_dtype != "auto" else 0.0)


def allowed_of_lse(lse: Tensor, dtype: str, kv_cache_dtype: str = "auto") -> Tensor:
    """How far each number of a log-sum-exp may lie from that of dense attention.

    Whatever the model's dtype, a kernel's scores and sums are float32; the weights that it adds up may have been
    rounded for the product with the values (FlashInfer in bfloat16: 1.4e-3 on an H200). A logarithm of 4 or more
    that is rounded to float16 is off by up to 2e-3, to bfloat16 by up to 1.6e-2. Queries beside an fp8 cache may be fp8
    themselves.
    """
    if kv_cache_dtype.startswith("fp8"):
        return TOLERANCES["fp8"] * (1 + lse.abs())
    return TOLERANCES["float32"] * (1 + lse.abs()) + LSE_IN_16_BITS[dtype]
