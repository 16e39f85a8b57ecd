"""A stand-in for FlashInfer on a CPU: the signatures of its public names, plans recorded, attention computed in torch.

What a wrapper runs is computed from the arrays that FlashInfer's kernels would read: the device's page list and lengths
of a captured size at the time of the run, those of the plan otherwise. So a plan that is given the wrong rows gives
wrong numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from attn_flashinfer.backend import FlashInferBackend
from attn_flashinfer.latent import LatentBackend
from attn_flashinfer.library import Library
from flashinfer_standin_decode import Decode, fast_decode_plan, xqa_batch_decode_with_kv_cache
from flashinfer_standin_latent import Latent, csr
from flashinfer_standin_prefill import Prefill
from flashinfer_standin_wrapper import Recorder
from torch import Tensor

from attncore import BackendConfig
from attncore.testing.harness.declared_needs import only_declared_fields

__all__ = [
    "Decode",
    "Latent",
    "Prefill",
    "Recorder",
    "backend",
    "csr",
    "fast_decode_plan",
    "latent_backend",
    "library",
    "merge_state_in_place",
    "xqa_batch_decode_with_kv_cache",
]


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    peak = torch.maximum(s, s_other)
    weights = [torch.exp2(one - peak) for one in (s, s_other)]
    total = weights[0] + weights[1]
    merged = v.float() * (weights[0] / total)[..., None] + v_other.float() * (weights[1] / total)[..., None]
    v.copy_(merged.to(v.dtype))
    s.copy_(peak + torch.log2(total))


def backend(recorder: Recorder | None = None, **changes: Any) -> FlashInferBackend:
    """A backend on the CPU over the stand-in: bf16, four heads over two of 64, blocks of 4; reading declared fields."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16", "block_size": 4}
    sizes |= changes
    if "spec" not in sizes:
        import attn_flashinfer

        sizes |= {"spec": attn_flashinfer.attncore_backend(), "variant": "built"}
    return _made(FlashInferBackend, recorder or Recorder(), sizes)


def latent_backend(recorder: Recorder | None = None, *, shows_its_module: bool = True, **changes: Any) -> LatentBackend:
    """The same over latent caches: four heads over rows of 576, the first 512 of which are the values."""
    import attn_flashinfer

    recorder = recorder or Recorder()
    recorder.version = recorder.version or "0.7.2"
    sizes: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "dtype": "bfloat16", "block_size": 4,
        "use_mla": True, "spec": attn_flashinfer.attncore_backend(), "variant": "latent_built",
    }  # fmt: skip
    return _made(LatentBackend, recorder, sizes | changes, shows_its_module=shows_its_module)


def library(recorder: Recorder | None = None, **facts: Any) -> Library:
    """The stand-in in FlashInfer's place; ``facts`` are attributes of its wrappers."""
    recorder = recorder or Recorder()
    parts: list[Any] = [
        type(part.__name__, (part,), {"recorder": recorder, **facts}) for part in (Decode, Prefill, Latent)
    ]
    return Library(
        parts[0], parts[1], fast_decode_plan, merge_state_in_place, xqa_batch_decode_with_kv_cache, recorder.version,
        parts[2], csr,
    )  # fmt: skip


def _made(kind: type[FlashInferBackend], recorder: Recorder, sizes: dict[str, Any], **facts: Any) -> Any:
    """A backend of ``kind`` over the stand-in."""
    made = library(recorder, **facts)
    on_cpu = type("OnCpu", (kind,), {"library": lambda _: made})
    return only_declared_fields(on_cpu(BackendConfig(**sizes)))
