"""The plugin's environment variables. Read when the spec is; anything they do not know is an error that says so."""

from __future__ import annotations

import os
from collections.abc import Mapping

KERNELS = ("auto", "aiter", "aiter_paged", "ck", "triton", "sdpa")
"""Values of the option ``kernel``, and of ATTNCORE_ROCM_KERNEL; all but ``auto`` are variants of the spec."""

FORMS = ("triton_no_fp8", "triton_no_bf16")
"""Variants of the kernel ``triton`` too, for NVIDIA GPUs before sm_89 and before sm_80."""

KERNEL = "ATTNCORE_ROCM_KERNEL"
DEV_DEVICE = "ATTNCORE_ROCM_DEV_DEVICE"
VARIABLES = {
    KERNEL: f"the default of the option kernel: one of {', '.join(KERNELS)}",
    DEV_DEVICE: "cuda or cpu (development only): where sdpa runs beside ROCm, on cpu the Triton kernels too",
}
DEV_DEVICES = {"cuda": "cuda:sm_80+", "cpu": "cpu"}


def kernel_of(variant: str) -> str:
    """The value of the option ``kernel`` that asks for a variant."""
    return "triton" if variant in FORMS else variant


def kernel(environ: Mapping[str, str] = os.environ) -> str:
    """What ATTNCORE_ROCM_KERNEL asks for, ``auto`` where it is not set; ValueError where it is none of KERNELS."""
    value = environ.get(KERNEL, "auto")
    if value not in KERNELS:
        raise ValueError(f"{KERNEL}: {value[:200]!r} is not one of {', '.join(KERNELS)}")
    return value


def dev_device(environ: Mapping[str, str] = os.environ) -> str | None:
    """For the plugin's developers: where ``sdpa`` runs beside ROCm, ``cuda`` or ``cpu``.

    On ``cpu`` the Triton kernels run too, in Triton's interpreter, so that it needs TRITON_INTERPRET=1. ValueError for
    any other value.
    """
    value = environ.get(DEV_DEVICE)
    if value is None:
        return None
    if value not in DEV_DEVICES:
        raise ValueError(
            f"{DEV_DEVICE}: {value[:200]!r} is not one of {', '.join(DEV_DEVICES)}; it is for development only"
        )
    if value == "cpu" and environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"{DEV_DEVICE}: cpu is Triton's interpreter; set TRITON_INTERPRET=1 as well")
    return value
