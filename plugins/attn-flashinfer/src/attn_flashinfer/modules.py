"""FlashInfer's compiled modules: what they are called, where they are, and whether others can be compiled.

Light: reads folders and environment variables, imports neither torch nor FlashInfer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

SHORT = {"float16": "f16", "bfloat16": "bf16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""Dtypes of the contract as the names of modules have them."""

ATTENTION = ("batch_prefill", "batch_decode", "batch_mla", "xqa")
"""How the names of modules of attention begin."""

XQA_PAGES = (16, 32, 64, 128)
"""Tokens that a page of the XQA kernel may hold."""


def cached(dtype: str, kv_cache_dtype: str) -> str:
    """The dtype of the cache, where ``auto`` is the model's."""
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def paged(dtype: str, kv_cache_dtype: str, head_size: int, *, window: bool, soft_cap: bool) -> str:
    """The module of prefills, and of decodes on tensor cores."""
    return (
        f"batch_prefill_with_kv_cache_{_facts(dtype, kv_cache_dtype, head_size, window, soft_cap)}_f16qk_False"
        "_kv_stride_equal"
    )


def cuda_core_decode(dtype: str, kv_cache_dtype: str, head_size: int, *, window: bool, soft_cap: bool) -> str:
    """The module of decodes on CUDA cores."""
    return f"batch_decode_with_kv_cache_{_facts(dtype, kv_cache_dtype, head_size, window, soft_cap)}"


def xqa(dtype: str, kv_cache_dtype: str, head_size: int, group: int, page: int, *, window: bool) -> str:
    """The module of decodes without a plan."""
    of_query, of_cache = SHORT[dtype], SHORT[cached(dtype, kv_cache_dtype)]
    return (
        f"xqa_input_{of_query}_kv_cache_{of_cache}_output_{of_query}_page_size_{page}_head_dim_{head_size}"
        f"_head_group_ratio_{group}_use_sliding_window_{window}_use_spec_dec_False_spec_q_seq_len_1"
    )


def latent(dtype: str, kv_cache_dtype: str, head_size: int, head_size_v: int, kernels: str) -> str:
    """The module of latent attention by ``kernels``, fa2 or fa3; rows of ``head_size``, whose values are the first
    ``head_size_v`` columns."""
    of_query, of_cache = SHORT[dtype], SHORT[cached(dtype, kv_cache_dtype)]
    return (
        f"batch_mla_attention_dtype_q_{of_query}_dtype_kv_{of_cache}_dtype_o_{of_query}_dtype_idx_i32"
        f"_head_dim_ckv_{head_size_v}_head_dim_kpe_{head_size - head_size_v}_profiler_False_planabi2"
        f"{'_sm90' if kernels == 'fa3' else ''}"
    )


def _facts(dtype: str, kv_cache_dtype: str, head_size: int, window: bool, soft_cap: bool) -> str:
    of_query, of_cache = SHORT[dtype], SHORT[cached(dtype, kv_cache_dtype)]
    return (
        f"dtype_q_{of_query}_dtype_kv_{of_cache}_dtype_o_{of_query}_dtype_idx_i32_head_dim_qk_{head_size}"
        f"_head_dim_vo_{head_size}_posenc_0_use_swa_{window}_use_logits_cap_{soft_cap}"
    )


def ahead_folders() -> Iterator[Path]:
    """Where a module ``name`` that was built ahead may be, as ``name/name.so``: in FlashInfer, or in a package of
    modules of the same version (as FlashInfer asks of it)."""
    package = package_folder()
    if package is None:
        return
    yield package / "data" / "aot"
    for folder in sorted(package.parent.glob("flashinfer_jit_cache*/jit_cache")):
        if os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK") or _of_this_version(folder.parent.name):
            yield folder


def compiled_folders(architecture: str = "") -> Iterator[Path]:
    """Where modules are that were compiled before, for ``architecture`` ("90") or, where that is empty, for any."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    for folder in sorted((base / ".cache" / "flashinfer" / version()).glob("*/cached_ops")):
        built_for = {part.rstrip("abcdefghijklmnopqrstuvwxyz") for part in folder.parent.name.split("_")}
        if not architecture or architecture in built_for:
            yield folder


def _of_this_version(package: str) -> bool:
    try:
        found = importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return found == version() or found.startswith(f"{version()}+")


def package_folder() -> Path | None:
    """Where FlashInfer is installed; None where it is not."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def version() -> str:
    """FlashInfer's version; ``not installed``."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def find(name: str, architecture: str = "") -> Path | None:
    """The file of a module that is there for a device of ``architecture`` ("90"; empty: not known); None where none is.

    FlashInfer loads what was built ahead as it is. What it compiled before it has ninja look at first, so that such
    modules are of no use where it cannot compile.
    """
    folders = list(ahead_folders())
    if not no_compiler():
        folders.extend(compiled_folders(architecture))
    return next((file for folder in folders if (file := folder / name / f"{name}.so").is_file()), None)


def _in(folders: Iterator[Path]) -> dict[str, Path]:
    """Every module in ``folders``: name -> file, the first found."""
    found: dict[str, Path] = {}
    for folder in folders:
        for file in sorted(folder.glob("*/*.so")):
            if file.stem == file.parent.name:
                found.setdefault(file.stem, file)
    return found


def no_compiler() -> str:
    """Why no module can be compiled here, as a sentence; empty where nvcc, ninja and a C++ compiler are found."""
    if forbids := os.environ.get("FLASHINFER_DISABLE_JIT"):  # whatever it is, "0" too
        return f"FLASHINFER_DISABLE_JIT={forbids} forbids compiling"
    missing = []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        if not Path(home, "bin", "nvcc").is_file():
            missing.append(f"nvcc in {home}/bin (CUDA_HOME)")
    elif not shutil.which("nvcc") and not Path("/usr/local/cuda/bin/nvcc").is_file():
        missing.append("nvcc")
    if not shutil.which("ninja"):
        missing.append("ninja")
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler.split()[0] if compiler.split() else "c++"):
        missing.append(f"the C++ compiler {compiler}")
    return f"{' and '.join(missing)} not found" if missing else ""


def report() -> dict[str, str]:
    """What `attncore doctor` says."""
    package = package_folder()
    if package is None:
        return {"flashinfer": "not installed; pip install 'flashinfer-python>=0.7.2,<0.8'"}
    ahead, before = _in(ahead_folders()), _in(compiled_folders())
    why = no_compiler()
    facts = {
        "flashinfer": f"{version()} at {package}",
        "compiler": why or "nvcc, ninja and a C++ compiler found: modules are compiled at first use",
        "modules built ahead": _counted(ahead),
        "modules compiled here": _counted(before) + (", of no use without a compiler" if before and why else ""),
    }
    for name, file in sorted({**before, **ahead}.items()):
        if name.startswith(ATTENTION):
            facts[name] = str(file)
    return facts


def _counted(found: dict[str, Path]) -> str:
    return f"{len(found)}, {sum(name.startswith(ATTENTION) for name in found)} of attention"
