"""Compiles, in parallel, the FlashInfer modules that this plugin's tests and benchmarks ask for.

    python build_modules.py [main] [e5m2] [crossed] [xqa] [decodes] [mla]

Needs nvcc and ninja. FlashInfer 0.7's functions that describe a module are private, so that this is a script for
developers: a user's modules come ahead of time by flashinfer-jit-cache, or at first use.
"""

import sys
import time
from functools import partial

import torch
from flashinfer.jit.attention.modules import (
    _gen_batch_prefill_primary_module,
    gen_batch_decode_module,
    gen_batch_mla_module,
)
from flashinfer.jit.cascade import gen_cascade_module
from flashinfer.jit.core import build_jit_specs
from flashinfer.jit.xqa import gen_xqa_module

BF16, FP16, INT32 = torch.bfloat16, torch.float16, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def prefill(dtype, cache, size, window=False, cap=False):
    return _gen_batch_prefill_primary_module("fa2", dtype, cache, dtype, INT32, size, size, 0, window, cap, False)


def decode(dtype, cache, size, window=False, cap=False):
    return gen_batch_decode_module(dtype, cache, dtype, INT32, size, size, 0, window, cap)


def xqa(cache, size, group, window=False, page=16):
    return gen_xqa_module(BF16, cache, page, size, group, window, BF16, 1, False)


def mla(kernels, dtype, cache):
    return gen_batch_mla_module(kernels, dtype, cache, dtype, INT32, 512, 64, False)


MODULES = {
    "main": [
        partial(prefill, BF16, BF16, 64),
        partial(prefill, BF16, BF16, 64, window=True),
        partial(prefill, BF16, BF16, 64, cap=True),
        partial(prefill, BF16, BF16, 64, window=True, cap=True),
        partial(prefill, BF16, E4M3, 64),
        partial(prefill, FP16, FP16, 64),
        partial(prefill, BF16, BF16, 128),
        partial(prefill, BF16, BF16, 128, window=True),
        partial(prefill, BF16, BF16, 128, cap=True),
        partial(prefill, BF16, BF16, 128, window=True, cap=True),
        partial(prefill, BF16, BF16, 256),
        partial(prefill, BF16, BF16, 256, window=True, cap=True),
        gen_cascade_module,
        partial(decode, BF16, BF16, 64),
        partial(decode, BF16, BF16, 64, window=True),
        partial(decode, BF16, BF16, 128),
        partial(decode, BF16, BF16, 256),
    ],
    "e5m2": [
        partial(prefill, BF16, E5M2, 64),
        partial(prefill, FP16, E5M2, 64),
        partial(decode, BF16, E5M2, 64),
    ],
    "crossed": [  # the kit's crossings of features, dtypes and caches: a window and a soft cap in one layer
        partial(prefill, FP16, FP16, 64, window=True, cap=True),
        partial(prefill, FP16, E4M3, 64),
        *(
            partial(prefill, dtype, cache, 64, window=True, cap=True)
            for dtype in (BF16, FP16)
            for cache in (E4M3, E5M2)
        ),
    ],
    "xqa": [
        partial(xqa, BF16, 64, 2),
        partial(xqa, BF16, 64, 2, window=True),
        partial(xqa, E4M3, 64, 2),
        partial(xqa, BF16, 128, 4),
    ],
    "decodes": [  # benchmarks/decode_kernels.py
        partial(prefill, BF16, BF16, 128),
        partial(prefill, BF16, E4M3, 128),
        partial(decode, BF16, BF16, 128),
        partial(decode, BF16, E4M3, 128),
        partial(xqa, BF16, 128, 4),
        partial(xqa, E4M3, 128, 4),
        partial(xqa, BF16, 128, 4, page=64),
        partial(xqa, E4M3, 128, 4, page=64),
    ],
    "mla": [
        partial(mla, "fa3", BF16, BF16),
        partial(mla, "fa2", BF16, BF16),
        partial(mla, "fa3", BF16, E4M3),
        partial(mla, "fa3", FP16, FP16),
    ],
}

if __name__ == "__main__":
    wanted = sys.argv[1:] or ["main"]
    if unknown := [name for name in wanted if name not in MODULES]:
        sys.exit(f"{unknown[0]}: no such set; choose of {', '.join(MODULES)}")
    start = time.time()
    specs = [make() for name in wanted for make in MODULES[name]]
    build_jit_specs(list({spec.name: spec for spec in specs}.values()), verbose=False)  # sets share some
    print(f"{', '.join(wanted)}: {time.time() - start:.0f} s")
