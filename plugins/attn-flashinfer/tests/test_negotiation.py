"""The spec on simulated hosts: what is chosen, what is refused, and what the refusal says."""

from __future__ import annotations

from typing import Any

import pytest

import attncore
from attncore import AttentionRequest, Host, NoBackendError
from attncore.registry.choice.choice import choose
from attncore.registry.choice.negotiate_installed import negotiate_installed

PACKAGES = {"flashinfer-python": "0.7.2.post1", "apache-tvm-ffi": "0.1.15.post2", "torch": "2.11.0"}


def negotiated(device: str = "sm_90", packages: dict[str, str] | None = None, **changes: Any) -> Any:
    request = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "backend": "flashinfer"}
    host = Host.assume(device, packages={**PACKAGES, **(packages or {})})
    return negotiate_installed(AttentionRequest(**{**request, **changes}), host=host)


def refusal(device: str = "sm_90", packages: dict[str, str] | None = None, **changes: Any) -> str:
    found = negotiated(device, packages, **changes)
    assert found.chosen is None
    return "; ".join(str(reason) for one in found.rejected if one.name == "flashinfer" for reason in one.reasons)


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_nvidia_gpus_since_ampere(device: str) -> None:
    choice = choose(negotiated(device))
    assert (choice.name, choice.variant, choice.block_size, choice.kv_cache_layout) == ("flashinfer", "jit", 16, "NHD")
    choice = choose(negotiated(device, head_size=64, dtype="float16", kv_cache_dtype="fp8", kv_cache_layout="HND"))
    assert choice.kv_cache_layout == "HND"


@pytest.mark.parametrize("decode", ["auto", "cuda_cores", "xqa"])
def test_draft_trees(decode: str) -> None:
    """Decodes of several tokens, which no option of ``decode`` concerns."""
    features = {"tree_mask", "sliding_window", "multi_token_decode"}
    assert choose(negotiated(features=features, options={"flashinfer": {"decode": decode}})).variant == "jit"


@pytest.mark.parametrize("device", ["sm_75", "gfx942", "cpu"])
def test_other_devices_are_refused(device: str) -> None:
    assert "device" in refusal(device)


@pytest.mark.parametrize(
    ("packages", "says"),
    [
        ({"flashinfer-python": ""}, "flashinfer-python is not installed; attn-flashinfer"),
        ({"flashinfer-python": "1.0.0"}, "flashinfer-python 1.0.0 is installed; attn-flashinfer"),
        ({"flashinfer-python": "0.6.9"}, "needs flashinfer-python>=0.7.2,<0.8"),
        ({"apache-tvm-ffi": ""}, "apache-tvm-ffi is not installed"),
    ],
)
def test_a_missing_library_or_another_version_is_a_reason(packages: dict[str, str], says: str) -> None:
    assert says in refusal(packages=packages)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_size": 80}, "head_size 80 not supported"),
        ({"dtype": "float32"}, "dtype float32 not supported"),
        ({"kv_cache_dtype": "float32"}, "kv_cache_dtype float32 not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 beside dtype bfloat16"),
        ({"alibi": True}, "FlashInfer makes its own slopes"),
        ({"features": {"encoder"}}, "it plans attention over the paged cache only"),
        ({"use_mla": True, "num_kv_heads": 1}, "head_size 128 not supported"),
        (
            {"use_mla": True, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "features": {"tree_mask"}},
            "its kernels of latent attention take no mask",
        ),
        ({"cuda_graph": "always"}, "cuda_graph always not supported"),
        ({"allow_compile": False}, "which compiles kernels at first use"),
        ({"options": {"flashinfer": {"decode": "fastest"}}}, "'fastest' is not one of"),
        ({"options": {"flashinfer": {"decode": "cuda_cores"}}, "num_heads": 10}, "groups of 5 heads"),
        ({"options": {"flashinfer": {"decode": "xqa"}}, "block_size": 8}, "block_size 8; it takes 16, 32"),
        ({"options": {"flashinfer": {"decode": "xqa"}}, "logits_soft_cap": 30.0}, "it has no logits_soft_cap"),
        (
            {"options": {"flashinfer": {"decode": "xqa"}}, "kv_cache_dtype": "fp8_e4m3", "sliding_window": 64},
            "not been shown right for windows over an fp8 cache",
        ),
        (
            {"options": {"flashinfer": {"decode": "xqa"}}, "kv_cache_dtype": "fp8_e5m2"},
            "decode=xqa: a cache of fp8_e5m2; of fp8 its kernel reads e4m3",
        ),
        ({"options": {"flashinfer": {"decode": "xqa"}}, "features": {"lse"}}, "it returns no log-sum-exp"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_it_cannot_run_is_a_reason(changes: dict[str, Any], says: str) -> None:
    assert says in refusal(**changes)


LATENT = {"num_heads": 16, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_latent_caches_have_a_variant(device: str) -> None:
    choice = choose(negotiated(device, **LATENT, features={"lse", "multi_token_decode"}, cuda_graph="uniform"))
    assert (choice.name, choice.variant, choice.block_size) == ("flashinfer", "latent_jit", 64)


def test_latent_caches_are_chosen_before_the_reference() -> None:
    host = Host.assume("sm_90", packages=PACKAGES)
    found = negotiate_installed(AttentionRequest(**LATENT, dtype="bfloat16"), host=host)
    assert found.chosen.name == "flashinfer"


@pytest.mark.parametrize(
    ("device", "changes", "says"),
    [
        ("sm_75", {}, "device"),
        ("sm_90", {"head_size": 640}, "head_size 640 not supported"),
        ("sm_90", {"head_size_v": 448}, "head_size_v 448 not supported"),
        ("sm_90", {"head_size_v": None}, "head_size_v: 576 of 576 found"),
        ("sm_90", {"num_heads": 20}, "num_heads: 20 found; over latent caches"),
        ("sm_90", {"num_heads": 256}, "query heads per key/value head: 256"),
        ("sm_90", {"sliding_window": 64}, "take no window"),
        ("sm_90", {"logits_soft_cap": 30.0}, "take no cap"),
        ("sm_90", {"kv_cache_layout": "HND"}, "kv_cache_layout HND"),
        ("sm_90", {"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2 not supported"),
        ("sm_90", {"kv_cache_dtype": "fp8_e4m3", "dtype": "float16"}, "read on sm_90 alone, by models in bfloat16"),
        ("sm_80", {"kv_cache_dtype": "fp8_e4m3"}, "read on sm_90 alone, by models in bfloat16"),
        ("sm_80", {"options": {"flashinfer": {"latent": "fa3"}}}, "latent=fa3 runs on sm_90 alone"),
        ("sm_90", {"options": {"flashinfer": {"decode": "xqa"}}}, "decode"),
    ],
    ids=str,
)
def test_why_a_latent_cache_is_refused(device: str, changes: dict[str, Any], says: str) -> None:
    said = refusal(device, **{**LATENT, **changes})
    assert says in said
    assert "plain heads" not in said, "variants for other caches say nothing"


def test_fp8_and_generations_of_latent_kernels() -> None:
    assert choose(negotiated(**LATENT, kv_cache_dtype="fp8_e4m3", features={"kv_scales"})).variant == "latent_jit"
    for kernels in ("fa2", "fa3"):
        assert choose(negotiated(**LATENT, options={"flashinfer": {"latent": kernels}})).variant == "latent_jit"


def test_xqa_is_for_hopper() -> None:
    options = {"options": {"flashinfer": {"decode": "xqa"}}}
    assert negotiated(**options).chosen.name == "flashinfer"
    assert "decode=xqa: it runs on sm_90" in refusal("sm_80", **options)


def test_it_comes_before_the_reference_on_a_gpu() -> None:
    request = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}
    host = Host.assume("sm_90", packages=PACKAGES)
    found = negotiate_installed(AttentionRequest(**request, exclude=("flash",)), host=host)
    assert found.chosen.name == "flashinfer"


def test_select_raises_with_the_reasons() -> None:
    with pytest.raises(NoBackendError, match="head_size 96 not supported"):
        attncore.select(
            num_heads=8, num_kv_heads=2, head_size=96, dtype="bfloat16", backend="flashinfer",
            host=Host.assume("sm_90", packages=PACKAGES),
        )  # fmt: skip
