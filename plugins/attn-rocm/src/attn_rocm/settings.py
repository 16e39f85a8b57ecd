"""The plugin's environment variables. Read when the spec is; anything they do not know is an error that says so."""

from __future__ import annotations

import os
from collections.abc import Mapping

KERNELS = ("auto", "aiter", "aiter_paged", "ck", "triton", "sdpa")
"""Values of the option ``kernel``, and of ATTNCORE_ROCM_KERNEL; all but ``auto`` are variants of the spec."""

KERNEL = "ATTNCORE_ROCM_KERNEL"
DEV_DEVICE = "ATTNCORE_ROCM_DEV_DEVICE"
VARIABLES = {
    KERNEL: f"the default of the option kernel: one of {', '.join(KERNELS)}",
    DEV_DEVICE: "cuda or cpu (development only): the platform beside ROCm on which the Triton kernels may run",
}
DEV_DEVICES = {"cuda": "cuda:sm_80+", "cpu": "cpu"}


def kernel(environ: Mapping[str, str] = os.environ) -> str:
    """What ATTNCORE_ROCM_KERNEL asks for, ``auto`` where it is not set; ValueError where it is none of KERNELS."""
    value = environ.get(KERNEL, "auto")
    if value not in KERNELS:
        raise ValueError(f"{KERNEL}: {value!r} is not one of {', '.join(KERNELS)}")
    return value


def dev_device(environ: Mapping[str, str] = os.environ) -> str | None:
    """For the plugin's developers: the platform beside ROCm on which its Triton kernels may run, ``cuda`` or ``cpu``.

    ``cpu`` is Triton's interpreter, so that it needs TRITON_INTERPRET=1. ValueError for any other value.
    """
    value = environ.get(DEV_DEVICE)
    if value is None:
        return None
    if value not in DEV_DEVICES:
        raise ValueError(f"{DEV_DEVICE}: {value!r} is not one of {', '.join(DEV_DEVICES)}; it is for development only")
    if value == "cpu" and environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"{DEV_DEVICE}: cpu is Triton's interpreter; set TRITON_INTERPRET=1 as well")
    return value
