"""What is chosen, on machines that are not this one, and what `explain` says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import flash_standin as standin
import pytest
from attn_flash import probe_results

import attncore
from attncore import AttentionRequest, Host, Reason
from attncore.registry.choice.explain import explain
from attncore.registry.choice.negotiate_installed import negotiate_installed

HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def host(device: str, *generations: str, **others: str) -> Host:
    return Host.assume(device, packages={**standin.packages(*generations), **others})


def choice(where: Host, **fields: Any) -> Any:
    return attncore.select(AttentionRequest(**{**HEADS, "backend": "flash", **fields}), host=where)


def reasons(where: Host, **fields: Any) -> list[Reason]:
    """Why flash cannot be used."""
    negotiation = negotiate_installed(AttentionRequest(**{**HEADS, **fields}), host=where)
    return [reason for one in negotiation.rejected if one.name == "flash" for reason in one.reasons]


@pytest.mark.parametrize(
    ("device", "installed", "fields", "variant", "block_size"),
    [
        ("sm_90", "2", {}, "fa2", 256),
        ("sm_90", "4", {}, "fa4", 128),
        ("sm_90", "24", {}, "fa4", 128),
        ("sm_90", "24", {"block_size": 16}, "fa4", 16),
        ("sm_90", "24", {"alibi": True}, "fa2", 256),
        ("sm_90", "24", {"alibi": "standard"}, "fa2", 256),
        ("sm_90", "24", {"sinks": True}, "fa4", 128),
        ("sm_90", "24", {"allow_compile": False}, "fa2", 256),
        ("sm_90", "24", {"options": {"flash": {"generation": "2"}}}, "fa2", 256),
        ("sm_90", "2", {"manager_block_size": 512}, "fa2", 256),
        ("sm_90", "2", {"manager_block_size": 768, "block_size": 256}, "fa2", 256),
        ("sm_90", "4", {"manager_block_size": 48}, "fa4", 48),
        ("sm_90", "3", {}, "fa3", 16),
        ("sm_90", "234", {}, "fa3", 16),
        ("sm_90", "34", {"block_size": 24}, "fa3", 24),
        ("sm_90", "34", {"sinks": True}, "fa4", 128),
        ("sm_90", "34", {"kv_cache_dtype": "fp8"}, "fa3", 16),
        ("sm_90", "23", {"alibi": True}, "fa2", 256),
        ("sm_90", "3", {"allow_compile": False}, "fa3", 16),
        ("sm_90", "234", {"options": {"flash": {"generation": "4"}}}, "fa4", 128),
        ("sm_90", "3", {"options": {"flash": {"generation": "3"}}}, "fa3", 16),
        ("sm_80", "23", {}, "fa2", 256),
        ("sm_100", "34", {}, "fa4", 128),
        ("sm_80", "24", {}, "fa2", 256),
        ("sm_86", "24", {"sliding_window": 4096, "logits_soft_cap": 30.0}, "fa2", 256),
        ("sm_120", "24", {}, "fa2", 256),
        ("sm_100", "24", {}, "fa4", 128),
        ("sm_100", "24", {"head_size": 192}, "fa2", 256),
        ("sm_100", "24", {"head_size": 256}, "fa4", 128),
        ("sm_90", "24", {"cuda_graph": "always"}, "fa4", 128),
        ("sm_90", "24", {"head_size": 160}, "fa2", 256),
        ("sm_90", "24", {"head_size": 96}, "fa4", 128),
        ("sm_90", "24", {"head_size": 96, "features": ["encoder_decoder"]}, "fa2", 256),
        ("sm_90", "24", {"head_size": 112, "features": ["encoder_decoder"]}, "fa4", 128),
    ],
)
def test_the_generation_that_fits(
    device: str, installed: str, fields: dict[str, Any], variant: str, block_size: int
) -> None:
    found = choice(host(device, *installed), **fields)
    assert (found.variant, found.block_size) == (variant, block_size)
    generation = {"fa2": "flash-attn 2.8.3.post2", "fa3": "flash-attn-3 3.0.0", "fa4": "flash-attn-4 4.0.0b36"}[variant]
    assert f"variant {variant} ({generation})" in found.explain()


@pytest.mark.parametrize(
    ("where", "fields", "code", "words"),
    [
        (host("sm_90", "2"), {"block_size": 16}, "block_size", "multiples of 256; install flash-attn-4"),
        (host("sm_90", "2"), {"sinks": True}, "unsupported", "the kernel has no place for them"),
        (host("sm_90", "4"), {"alibi": True}, "unsupported", "the kernel takes no slopes"),
        (host("sm_90", "4"), {"allow_compile": False}, "compiler", "compiles kernels at first use"),
        (host("sm_86", "4"), {}, "device", "no paged cache is read on sm_86"),
        (host("sm_120", "4"), {}, "device", "no paged cache is read on sm_120"),
        (host("sm_100", "4"), {"head_size": 192}, "head_size", "head_size 192 not supported on sm_100"),
        (host("sm_90", "4"), {"head_size": 160}, "head_size", "head_size 160"),
        (host("sm_90", "4"), {"head_size": 80, "features": ["encoder_decoder"]}, "head_size", "wrong from pages"),
        (host("sm_75", "2", "4"), {}, "device", "cuda:sm_80+"),
        (host("sm_90"), {}, "requirement", "flash-attn is not installed"),
        (host("sm_90", **{"flash-attn": "2.7.4"}), {}, "requirement", "flash-attn 2.7.4 is installed"),
        (host("sm_90", **{"flash-attn": "2.9.0"}), {}, "requirement", "needs flash-attn>=2.8,<2.9"),
        (host("sm_90", "3"), {"sinks": True}, "unsupported", "vLLM's build of them has"),
        (host("sm_90", "3"), {"alibi": True}, "unsupported", "the kernel takes no slopes"),
        (host("sm_80", "3"), {}, "device", "cuda:sm_90"),
        (host("sm_90", "3"), {"kv_cache_dtype": "fp8", "dtype": "float16"}, "dtype", "its output is bfloat16"),
        (host("sm_90", "3"), {"kv_cache_dtype": "fp8", "head_size": 72}, "head_size", "multiples of 16"),
        (host("sm_90", "3_vllm"), {"sinks": True, "num_heads": 128}, "check", "with sinks it takes 64 at most"),
        (host("sm_90", "3"), {"options": {"flash": {"generation": "2"}}}, "option", "options ask for generation 2"),
        (host("sm_90", "2", "4"), {"dtype": "float32"}, "dtype", "bfloat16, float16"),
        (host("sm_90", "2", "4"), {"head_size": 264}, "head_size", "up to 256"),
        (host("sm_90", "2", "4"), {"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8_e4m3"),
        (host("sm_90", "2"), {"cuda_graph": "always"}, "cuda_graph", "uniform"),
        (host("sm_90", "4"), {"options": {"flash": {"generation": "2"}}}, "option", "options ask for generation 2"),
    ],
)
def test_the_reason_where_none_fits(where: Host, fields: dict[str, Any], code: str, words: str) -> None:
    found = reasons(where, **fields)
    assert [reason for reason in found if reason.code == code and words in str(reason)], found


@pytest.mark.parametrize(
    ("fields", "variant"),
    [({}, "fa3_vllm"), ({"sinks": True}, "fa3_vllm"), ({"options": {"flash": {"generation": "3"}}}, "fa3_vllm"),
     ({"alibi": True}, "fa2")],
)  # fmt: skip
def test_the_library_in_vllms_wheel(fields: dict[str, Any], variant: str) -> None:
    assert choice(host("sm_90", "3_vllm", "2"), **fields).variant == variant


def test_a_vllm_without_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dataclasses.replace(host("sm_90", "3_vllm"), assumed=False)
    monkeypatch.setattr(probe_results, "library_file", lambda generation: None)
    assert "installed without its library of FlashAttention 3" in "\n".join(map(str, reasons(here)))
    monkeypatch.setattr(probe_results, "library_file", lambda generation: Path("there.so"))
    assert choice(here).variant == "fa3_vllm"


def test_prefill_and_decode_with_the_reference_share_a_block_size_and_a_layout() -> None:
    joint = attncore.select_joint(
        AttentionRequest(**HEADS), host=host("sm_90", "2"), prefer_prefill=("flash",), prefer_decode=("reference",)
    )
    assert (joint.prefill.name, joint.decode.name) == ("flash", "reference")
    assert (joint.block_size, joint.kv_cache_layout) == (256, "NHD")


@pytest.mark.parametrize(
    ("generations", "first", "says"),
    [
        ("3", "flash", "fa3 on sm_90 before flashinfer: "),
        ("2", "flashinfer", "fa2 on sm_90 after flashinfer: "),
        ("4", "flash", "on sm_90 before flashinfer: "),
        ("24", "flash", "on sm_90 before flashinfer: "),
    ],
)
def test_explain_says_on_which_side_of_flashinfer_a_generation_stands(generations: str, first: str, says: str) -> None:
    """By their priorities, not by their names; both specs are those that are installed."""
    installed = {"flashinfer-python": "0.7.2", "apache-tvm-ffi": "0.1.12", "torch": "2.11.0"}
    found = negotiate_installed(AttentionRequest(**HEADS), host=host("sm_90", *generations, **installed))
    priorities = {one.name: one.match.priority for one in (*found.usable, *found.rejected) if one.match}
    assert (priorities["flash"] > priorities["flashinfer"]) == (first == "flash")
    assert says in explain(found)


@pytest.mark.parametrize("device", ["sm_80", "sm_90"])
def test_generation_2_is_chosen_where_flashinfer_comes_later_or_is_not_installed(device: str) -> None:
    """On sm_80 it comes before flashinfer, as ever."""
    installed = {
        "sm_80": {"flashinfer-python": "0.7.2", "apache-tvm-ffi": "0.1.12"},
        "sm_90": {"flashinfer-python": ""},
    }
    found = attncore.select(AttentionRequest(**HEADS), host=host(device, "2", **installed[device]))
    assert (found.name, found.variant) == ("flash", "fa2")
