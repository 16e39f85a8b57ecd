"""FlashAttention 3 as vLLM's wheel carries it: the same kernels, with sinks. vLLM itself is not imported."""

from __future__ import annotations

import torch

from attn_flash import probe_results
from attn_flash.generation3 import Layer, Library

__all__ = ["Layer", "load"]


def load() -> Library:
    """The operators, of the library file in vLLM's wheel. ImportError where the wheel has none."""
    file = probe_results.library_file("3_vllm")
    if file is None:
        raise ImportError("vllm is installed without its library of FlashAttention 3 (vllm_flash_attn/_vllm_fa3_C)")
    torch.ops.load_library(str(file))  # type: ignore[no-untyped-call]
    operators = torch.ops._vllm_fa3_C
    # Behind the sinks: no context parallelism, and where its rows end.
    return Library(operators.fwd, operators.get_scheduler_metadata, (), lambda sinks, ends: (sinks, 1, 0, ends))
