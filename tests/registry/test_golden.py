"""Explain texts for eight machines, produced without any of them. Run as a program, it writes them anew."""

from pathlib import Path

import pytest
from lookalikes import PACKAGES, RECORDS

from attncore import AttentionRequest, Host
from attncore.registry.choice.choice import choose
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate import negotiate

FOLDER = Path(__file__).parent / "golden"
DEVICES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100", "cpu")
INSTALLED_TOO = {"sm_100": {"flash-attn-4": "4.0.0b36"}, "sm_80": {"flashinfer-python": "0.6.4"}}
PLAIN = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
REQUESTS = {
    "plain": PLAIN,
    "blocks of 16, a window, preferences": {
        **PLAIN,
        "block_size": 16,
        "sliding_window": 4096,
        "prefer": ("flash", "flashinfer"),
    },
    "any ALiBi slopes, whole steps captured": {**PLAIN, "alibi": True, "cuda_graph": "always"},
    "sinks, head size 64, no compiler": {
        **PLAIN,
        "head_size": 64,
        "sinks": True,
        "sliding_window": 128,
        "allow_compile": False,
    },
    "fp8 cache with scales, 131072 tokens": {
        **PLAIN,
        "kv_cache_dtype": "fp8",
        "features": ("kv_scales",),
        "max_model_len": 131072,
    },
    "float32, head size 80": {**PLAIN, "head_size": 80, "dtype": "float32"},
    "latent attention": {
        **PLAIN,
        "num_kv_heads": 1,
        "head_size": 576,
        "head_size_v": 512,
        "use_mla": True,
    },
    "flash or nothing, manager blocks of 64": {**PLAIN, "backend": "flash", "manager_block_size": 64},
    "rocm or what there is": {**PLAIN, "backend": "rocm", "policy": "fallback", "num_blocks": 100000},
}


def answer(device: str) -> str:
    """What every request gets on ``device``."""
    host = Host.assume(device, packages={**PACKAGES, **INSTALLED_TOO.get(device, {})})
    parts = []
    for name, fields in REQUESTS.items():
        request = AttentionRequest(**fields)
        negotiation = negotiate(request, host, RECORDS)
        choice = choose(negotiation)
        end = f"block_size {choice.block_size}, {choice.kv_cache_layout}" if choice else negotiation.refusal
        parts.append(f"== {name}\n{explain(negotiation)}\n-> {end}\n")
    return "\n".join(parts)


@pytest.mark.parametrize("device", DEVICES)
def test_explain(device):
    assert answer(device) == (FOLDER / f"{device}.txt").read_text()


if __name__ == "__main__":
    for one in DEVICES:
        (FOLDER / f"{one}.txt").write_text(answer(one))
