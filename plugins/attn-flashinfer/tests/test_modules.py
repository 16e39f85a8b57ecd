"""Names of FlashInfer's modules, where they are looked for, and what doctor and negotiation make of it."""

from __future__ import annotations

from pathlib import Path

import attn_flashinfer
import pytest
from attn_flashinfer import checks, modules

from attncore import AttentionRequest, Host

BF16_PAGED = modules.paged("bfloat16", "auto", 64, window=False, soft_cap=False)


def test_names_are_those_that_flashinfer_gives() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    real = pytest.importorskip("flashinfer.jit.attention.modules", reason="FlashInfer is not installed")
    kinds = {
        "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }  # fmt: skip
    for dtype, cache in (("float16", "auto"), ("bfloat16", "fp8_e4m3"), ("float16", "fp8_e5m2")):
        query, kept = kinds[dtype], kinds[modules.cached(dtype, cache)]
        for window, soft_cap in ((False, False), (True, False), (False, True)):
            facts = query, kept, query, torch.int32, 128, 128, 0, window, soft_cap
            uri = real.get_batch_prefill_uri("fa2", *facts, False)
            ours = modules.paged(dtype, cache, 128, window=window, soft_cap=soft_cap)
            assert ours == real._get_batch_prefill_module_uri(uri, "fa2", "equal", "full")
            ours = modules.cuda_core_decode(dtype, cache, 128, window=window, soft_cap=soft_cap)
            assert ours == real.get_batch_decode_uri(*facts)
        for kernels in ("fa2", "fa3"):
            uri = real.get_batch_mla_uri(kernels, query, kept, query, torch.int32, 512, 64, False)
            assert modules.latent(dtype, cache, 576, 512, kernels) == uri


def test_the_name_of_an_xqa_module(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    real = pytest.importorskip("flashinfer.jit.xqa", reason="FlashInfer is not installed")
    monkeypatch.setattr(real, "gen_jit_spec", lambda name, *_, **__: name)
    monkeypatch.setattr(real.CompilationContext, "get_nvcc_flags_list", lambda *_, **__: [])
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for window in (False, True):
        name = real.gen_xqa_module(bf16, fp8, 32, 128, 4, window, bf16, 1, False)
        assert modules.xqa("bfloat16", "fp8_e4m3", 128, 4, 32, window=window) == name


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FlashInfer folder of the test's own, and nothing compiled."""
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    monkeypatch.setattr(modules, "package_folder", lambda: package)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "home"))
    monkeypatch.setattr(modules, "version", lambda: "0.7.2.post1")
    return package


def _build(folder: Path, name: str) -> Path:
    file = folder / name / f"{name}.so"
    file.parent.mkdir(parents=True)
    file.touch()
    return file


def test_a_module_is_found_wherever_flashinfer_looks(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert modules.find("page") is None
    monkeypatch.setattr(modules, "no_compiler", lambda: "")
    monkeypatch.setattr(modules, "_of_this_version", lambda package: True)
    compiled = tmp_path / "home" / ".cache" / "flashinfer" / "0.7.2.post1" / "80_90a" / "cached_ops"
    folders = compiled, installed.parent / "flashinfer_jit_cache" / "jit_cache", installed / "data" / "aot"
    for folder in folders:  # the last one first
        assert modules.find("page", "90") != _build(folder, "page").parent
        assert modules.find("page", "90") == folder / "page" / "page.so"


def test_what_was_compiled_before_counts_for_its_architecture_and_where_ninja_can_look_at_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _build(tmp_path / "home" / ".cache" / "flashinfer" / "0.7.2.post1" / "90a" / "cached_ops", "page")
    monkeypatch.setattr(modules, "no_compiler", lambda: "")
    assert modules.find("page", "90") == modules.find("page") == file
    assert modules.find("page", "80") is None
    monkeypatch.setattr(modules, "no_compiler", lambda: "ninja not found")
    assert modules.find("page", "90") is None


def test_a_package_of_modules_of_another_version_is_not_looked_at(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _build(installed.parent / "flashinfer_jit_cache" / "jit_cache", "page")
    for version, there in (("0.7.2.post1+cu130", True), ("0.7.2.post1", True), ("0.7.3+cu130", False)):
        monkeypatch.setattr(modules.importlib.metadata, "version", lambda name, version=version: version)
        assert (modules.find("page") is not None) == there


def test_what_doctor_says(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _build(installed / "data" / "aot", BF16_PAGED)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "0")  # which FlashInfer takes for yes
    said = attn_flashinfer.attncore_doctor(Host.assume("sm_90"))
    assert said["flashinfer"] == f"0.7.2.post1 at {installed}"
    assert said["compiler"] == "FLASHINFER_DISABLE_JIT=0 forbids compiling"
    assert said["modules built ahead"] == "1, 1 of attention"
    assert said["modules compiled here"] == "0, 0 of attention"
    assert said[BF16_PAGED] == str(file)
    monkeypatch.setattr(modules, "package_folder", lambda: None)
    assert "pip install" in attn_flashinfer.attncore_doctor(Host.assume("sm_90"))["flashinfer"]


def test_a_compiler_is_nvcc_ninja_and_one_for_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    there = {"ninja": "/bin/ninja", "c++": "/bin/c++", "nvcc": "/bin/nvcc"}
    monkeypatch.setattr(modules.shutil, "which", there.get)
    assert modules.no_compiler() == ""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # FlashInfer asks there, and nowhere else
    assert modules.no_compiler() == f"nvcc in {tmp_path}/bin (CUDA_HOME) not found"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert modules.no_compiler() == ""
    monkeypatch.setenv("CXX", "clang++ -O2")
    assert modules.no_compiler() == "the C++ compiler clang++ -O2 not found"
    monkeypatch.delenv("CXX")
    del there["ninja"]
    assert modules.no_compiler() == "ninja not found"


def test_without_modules_and_without_a_compiler_the_reason_says_what_to_install(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = AttentionRequest(num_heads=4, num_kv_heads=2, head_size=64, dtype="bfloat16")
    host = Host(device="cuda:sm_90")
    monkeypatch.setattr(modules, "no_compiler", lambda: "nvcc not found")
    assert "1 of the modules needed are not built ahead" in str(next(checks.built(request, host)))
    reason = next(checks.compiled(request, host))
    assert str(reason).startswith("modules have to be compiled, but nvcc not found; install the CUDA toolkit (nvcc)")
    _build(installed / "data" / "aot", BF16_PAGED)
    assert list(checks.built(request, host)) == []
    monkeypatch.setattr(modules, "no_compiler", lambda: "")
    assert list(checks.compiled(request, host)) == []


def test_what_a_request_needs() -> None:
    facts = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "float16", "block_size": 32}
    asked = AttentionRequest(**facts, sliding_window=9, options={"flashinfer": {"decode": "xqa"}})
    assert checks.needed(asked) == [
        modules.paged("float16", "auto", 128, window=True, soft_cap=False),
        modules.xqa("float16", "auto", 128, 4, 32, window=True),
    ]
    asked = AttentionRequest(**facts, options={"flashinfer": {"cascade": True}})
    assert checks.needed(asked)[1:] == ["cascade"]
    assert checks.needed(AttentionRequest(**{**facts, "dtype": "float32"})) == []
    e5m2 = checks.needed(AttentionRequest(**facts, kv_cache_dtype="fp8_e5m2"))
    assert e5m2 == [modules.paged("float16", "fp8_e5m2", 128, window=False, soft_cap=False)]
    assert "dtype_q_f16_dtype_kv_e5m2_dtype_o_f16" in e5m2[0]


def test_what_a_request_for_a_latent_cache_needs() -> None:
    facts = {"num_heads": 8, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}
    for device, kernels in (("cuda:sm_90", "fa3"), ("cuda:sm_80", "fa2")):
        host = Host(device=device)
        asked = AttentionRequest(**facts, dtype="bfloat16")
        assert checks.needed_latent(asked, host) == [modules.latent("bfloat16", "auto", 576, 512, kernels)]
        assert checks.needed_latent(AttentionRequest(**facts, dtype="float32"), host) == []
    asked = AttentionRequest(**facts, dtype="bfloat16", options={"flashinfer": {"latent": "fa2"}})
    assert checks.needed_latent(asked, Host(device="cuda:sm_90"))[0].endswith("_planabi2")
