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

SHORT = {"float16": "f16", "bfloat16": "bf16", "fp8_e4m3": "e4m3"}
"""Dtypes of the contract as the names of modules have them."""

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


def _facts(dtype: str, kv_cache_dtype: str, head_size: int, window: bool, soft_cap: bool) -> str:
    of_query, of_cache = SHORT[dtype], SHORT[cached(dtype, kv_cache_dtype)]
    return (
        f"dtype_q_{of_query}_dtype_kv_{of_cache}_dtype_o_{of_query}_dtype_idx_i32_head_dim_qk_{head_size}"
        f"_head_dim_vo_{head_size}_posenc_0_use_swa_{window}_use_logits_cap_{soft_cap}"
    )


def folders() -> Iterator[Path]:
    """Where a module ``name`` may be, as ``name/name.so``: built ahead, in a cache package, compiled before."""
    package = package_folder()
    if package is None:
        return
    yield package / "data" / "aot"
    yield from sorted(package.parent.glob("flashinfer_jit_cache*/jit_cache"))
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    yield from sorted((base / ".cache" / "flashinfer" / version()).glob("*/cached_ops"))


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


def find(name: str) -> Path | None:
    """The file of a module that is built; None where it is not."""
    return next((file for folder in folders() if (file := folder / name / f"{name}.so").is_file()), None)


def built() -> dict[str, Path]:
    """Every module that is built: name -> file, the first found."""
    found: dict[str, Path] = {}
    for folder in folders():
        for file in sorted(folder.glob("*/*.so")):
            if file.stem == file.parent.name:
                found.setdefault(file.stem, file)
    return found


def no_compiler() -> str:
    """Why no module can be compiled here, as a sentence; empty where nvcc and ninja are found."""
    if os.environ.get("FLASHINFER_DISABLE_JIT", "0") == "1":
        return "FLASHINFER_DISABLE_JIT=1 forbids compiling"
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    missing = []
    if not shutil.which("nvcc") and not any(home and Path(home, "bin", "nvcc").is_file() for home in homes):
        missing.append("nvcc")
    if not shutil.which("ninja"):
        missing.append("ninja")
    return f"{' and '.join(missing)} not found" if missing else ""


def report() -> dict[str, str]:
    """What `attncore doctor` says."""
    package = package_folder()
    if package is None:
        return {"flashinfer": "not installed; pip install 'flashinfer-python>=0.7.2,<0.8'"}
    found = built()
    ours = {name: file for name, file in found.items() if name.startswith(("batch_prefill", "batch_decode", "xqa"))}
    facts = {
        "flashinfer": f"{version()} at {package}",
        "compiler": no_compiler() or "nvcc and ninja found: modules are compiled at first use",
        "modules built": f"{len(found)}, {len(ours)} of attention",
    }
    for name, file in sorted(ours.items()):
        facts[name] = str(file)
    return facts
