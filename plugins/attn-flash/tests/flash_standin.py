"""The libraries' functions in torch, for machines without a GPU: their signatures, their rules, their traps.

Whatever a real kernel leaves unwritten is NaN here; whatever it reads beyond a sequence counts; arguments that it
refuses or misreads raise. ``test_signatures`` compares the signatures with the libraries' own sources.
"""

from __future__ import annotations

from typing import Any

from flash_standin_generation2 import Generation2
from flash_standin_generation3 import Generation3
from flash_standin_generation4 import Generation4

import attncore
from attncore import AttentionRequest, Host


def install(monkeypatch: Any, generation: str, library: Any) -> Any:
    """``library`` in place of the generation's own."""
    from attn_flash.generations import MODULES

    given = library.library() if generation.startswith("3") else library
    monkeypatch.setattr(MODULES[generation], "load", lambda: given)
    return library


MADE: dict[str, Any] = {
    "2": Generation2,
    "3": lambda: Generation3(sinks=False),
    "3_vllm": Generation3,
    "4": Generation4,
}
"""Generation -> what makes its stand-in."""

PACKAGES = {
    "2": {"flash-attn": "2.8.3.post2"},
    "3": {"flash-attn-3": "3.0.0"},
    "3_vllm": {"vllm": "0.33.0"},
    "4": {"flash-attn-4": "4.0.0b36"},
}
"""What a host has that has one generation only."""


def packages(*generations: str) -> dict[str, str]:
    """Versions of a host that has these generations, and no other."""
    known = {"flash-attn": "", "flash-attn-4": "", "flash-attn-3": "", "vllm": "", "torch": "2.11.0"}
    for generation in generations:
        known |= PACKAGES[generation]
    return known


BLOCK = {"2": 256, "3": 16, "3_vllm": 16, "4": 16}
"""A block size of each generation."""


def create(generation: str, **fields: Any) -> Any:
    """A small backend of an assumed H100 that has this generation, on the CPU."""
    request = AttentionRequest(
        **{"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "bfloat16", "backend": "flash",
           "block_size": BLOCK[generation], **fields}
    )  # fmt: skip
    host = Host.assume("sm_90", packages=packages(generation))
    return attncore.select(request, host=host).create(device="cpu")


def forget_calls(backend: Any) -> None:
    """Drops what a backend's stand-in was given: it keeps the tensors."""
    library = backend._library
    getattr(getattr(library, "forward", None), "__self__", library).calls.clear()
