"""The variants whose decodes run by XQA without being asked: when they are chosen, and what they give."""

from __future__ import annotations

from functools import partial
from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from attncore import AttentionRequest, Host
from attncore.builder import MetadataBuilder
from attncore.registry.choice.choice import choose
from attncore.registry.choice.negotiate_installed import negotiate_installed
from attncore.testing.engines import captured_engine
from attncore.testing.engines.captured_engine import CapturedEngine
from attncore.testing.engines.engine import Engine

PACKAGES = {"flashinfer-python": "0.7.2.post1", "apache-tvm-ffi": "0.1.15.post2", "torch": "2.11.0"}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def variant_of(device: str = "sm_90", **changes: Any) -> str:
    request = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16", "backend": "flashinfer"}
    host = Host.assume(device, packages=PACKAGES)
    return choose(negotiate_installed(AttentionRequest(**{**request, **changes}), host=host)).variant


@pytest.mark.parametrize("device", ["sm_90", "sm_120"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 64},
        {"features": {"kv_scales", "kv_scales_on_device", "multi_token_decode"}},
        {"sinks": True},
        {"cuda_graph": "uniform"},
        {"options": {"flashinfer": {"decode": "xqa"}}},
        {"num_heads": 64},
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given) or "none",
)
def test_fp8_caches_get_it(device: str, changes: dict[str, Any]) -> None:
    assert variant_of(device, **FP8, **changes) == "xqa_jit"


@pytest.mark.parametrize(
    ("device", "changes"),
    [
        ("sm_90", {"kv_cache_dtype": "auto"}),
        ("sm_90", {"kv_cache_dtype": "fp8_e5m2"}),
        ("sm_80", FP8),
        ("sm_100", FP8),
        ("sm_90", {**FP8, "block_size": 8}),
        ("sm_90", {**FP8, "num_heads": 80}),
        ("sm_90", {**FP8, "sliding_window": 64}),
        ("sm_90", {**FP8, "logits_soft_cap": 30.0}),
        ("sm_90", {**FP8, "features": {"lse"}}),
        ("sm_90", {**FP8, "features": {"kv_scales_per_head"}}),
        ("sm_90", {**FP8, "options": {"flashinfer": {"decode": "tensor_cores"}}}),
        ("sm_90", {**FP8, "options": {"flashinfer": {"decode": "cuda_cores"}}}),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given) or "none",
)
def test_others_get_the_kernels_with_a_plan(device: str, changes: dict[str, Any]) -> None:
    assert variant_of(device, **changes) == "jit"


def xqa_backend(recorder: standin.Recorder | None = None, **changes: Any) -> Any:
    spec = __import__("attn_flashinfer").attncore_backend()
    facts: dict[str, Any] = {"block_size": 16, "spec": spec, "variant": "xqa_built", **FP8, **changes}
    return standin.backend(recorder, **facts)


def test_a_backend_of_the_variant_plans_no_decodes() -> None:
    recorder = standin.Recorder()
    engine = Engine(xqa_backend(recorder), junk=float("nan"))
    engine.add("a", 20)
    engine.add("b", 3)
    engine.step({"a": 20, "b": 3})
    for name in "ab":
        engine.grow(name)
    engine.step({"a": 1, "b": 1})
    assert not recorder.of("decode.plan")
    with pytest.raises(ValueError, match=r"^options: decode=tensor_cores: asked for; this variant is"):
        xqa_backend(options={"decode": "tensor_cores"})


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"k_scale": 0.5, "v_scale": 2.0},
        {"k_scale": torch.tensor(1024.0), "v_scale": torch.tensor([0.25]), "scale": 64**-0.5 / 1024},
        {"k_scale": torch.tensor(1024.0), "v_scale": 0.25, "scale": 64**-0.5 / 1024},
        {"sinks": [0.5, -1.0, 2.0, 0.0]},
        {"sinks": [0.5, -1.0, 2.0, 0.0], "k_scale": torch.tensor(3.0), "v_scale": torch.tensor(0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_captured_decodes(features: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_engine, "MetadataBuilder", partial(MetadataBuilder, transport="copy"))
    engine = CapturedEngine(xqa_backend(), tokens, junk=float("nan"), **features)
    for _ in range(8):
        engine.change()
        engine.replayed()


def test_a_scale_that_is_set_later_is_followed() -> None:
    engine = Engine(xqa_backend(), k_scale=torch.tensor(2.0), v_scale=1.0)
    engine.add("a", 9)
    engine.step({"a": 9})
    engine.impl.set_scales(torch.tensor(4.0), 1.0)
    engine.features["k_scale"] = torch.tensor(4.0)
    engine.add("b", 18)
    engine.step({"b": 17})
    engine.step({"b": 1})


def test_what_it_lacks_is_refused() -> None:
    backend = xqa_backend()
    for features, says in (
        ({"sliding_window": 5}, "sliding_window: flashinfer does not support sliding_window"),
        ({"logits_soft_cap": 2.0}, "logits_soft_cap: flashinfer does not support logits_soft_cap"),
        ({"k_scale": torch.tensor([1.0, 2.0])}, "k_scale: "),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            backend.impl("layers.0", scale=1.0, **features)
