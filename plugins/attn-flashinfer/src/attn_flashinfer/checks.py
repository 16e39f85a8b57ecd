"""What no field of the spec can say: combinations that FlashInfer lacks, and whether its modules are there. Light."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attn_flashinfer import modules
from attncore import Reason

if TYPE_CHECKING:
    from attncore import AttentionRequest, Host

INSTALL = (
    "install the CUDA toolkit (nvcc) and ninja, or a package of built modules (pip install flashinfer-jit-cache from "
    "FlashInfer's index)"
)


XQA_WINDOW_FP8 = "has not been shown right for windows over an fp8 cache"


def built(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against the variant that compiles nothing: a module that the request needs is not built."""
    yield from _both(request, host)
    if host.platform != "cuda":
        return
    if host.assumed:
        yield "which modules are built cannot be seen for an assumed host"
        return
    architecture = host.device.rpartition("sm_")[2]
    missing = [name for name in needed(request) if modules.find(name, architecture) is None]
    if missing:
        yield f"{len(missing)} of the modules needed are not built ahead, first {missing[0]}"


def compiled(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against the variant that compiles: no compiler."""
    yield from _both(request, host)
    if not host.assumed and host.platform == "cuda" and (why := modules.no_compiler()):
        yield Reason("compiler", f"modules have to be compiled, but {why}", fix=INSTALL)


def needed(request: AttentionRequest) -> list[str]:
    """The modules that layers with the request's window and soft cap load; none for dtypes that FlashInfer lacks."""
    if request.dtype not in modules.SHORT or modules.cached(request.dtype, request.kv_cache_dtype) not in modules.SHORT:
        return []
    group = request.num_heads // request.num_kv_heads
    return modules_of(
        (request.dtype, request.kv_cache_dtype, request.head_size),
        decode_kernel(request, group),
        group,
        request.block_size or 16,
        window=request.sliding_window is not None,
        soft_cap=request.logits_soft_cap is not None,
        cascade=bool(request.options.get("flashinfer", {}).get("cascade")),
    )


def modules_of(
    facts: tuple[str, str, int], kernel: str, group: int, page: int, *, window: bool, soft_cap: bool, cascade: bool
) -> list[str]:
    """The modules of layers of ``facts`` (dtype, cache dtype, head size), whose decodes ``kernel`` runs."""
    names = [modules.paged(*facts, window=window, soft_cap=soft_cap)]
    if cascade and not window:
        names.append("cascade")
    if kernel == "cuda_cores":
        names.append(modules.cuda_core_decode(*facts, window=window, soft_cap=soft_cap))
    elif kernel == "xqa":
        names.append(modules.xqa(*facts, group, page, window=window))
    return names


def decode_kernel(request: AttentionRequest, group: int) -> str:
    """What the option ``decode`` comes to."""
    asked = str(request.options.get("flashinfer", {}).get("decode", "auto"))
    return automatic(group) if asked == "auto" else asked


def automatic(group: int) -> str:
    """The kernel of decodes where none is asked for: the faster one in the measurements of README.md."""
    return "tensor_cores"


def xqa_problem(group: int, page: int, soft_cap: float | None, device: str = "cuda:sm_90") -> str:
    """Why XQA cannot run such layers, as a sentence; empty where it can."""
    if device not in ("cuda:sm_90", "cuda:sm_120"):
        return f"decode=xqa: it runs on sm_90 and sm_120, not on {device}"
    if page not in modules.XQA_PAGES:
        return f"decode=xqa: block_size {page}; it takes {', '.join(map(str, modules.XQA_PAGES))}"
    if group > 32:
        return f"decode=xqa: {group} query heads over one; it takes 32"
    if soft_cap is not None:
        return "decode=xqa: it has no logits_soft_cap"
    return ""


def cuda_core_problem(group: int) -> str:
    """Why the CUDA-core kernel cannot run such groups, as a sentence; empty where it can."""
    taken = (1, 2, 3, 4, 6, 8, 16)
    if group in taken:
        return ""
    return f"decode=cuda_cores: groups of {group} heads; it takes {', '.join(map(str, taken))}"


def _both(request: AttentionRequest, host: Host) -> Iterator[str]:
    if request.kv_cache_dtype in ("float16", "bfloat16") and request.kv_cache_dtype != request.dtype:
        yield f"kv_cache_dtype {request.kv_cache_dtype} beside dtype {request.dtype}: only fp8 may differ"
    group = request.num_heads // request.num_kv_heads
    kernel = decode_kernel(request, group)
    if kernel == "xqa":
        if problem := xqa_problem(group, request.block_size or 16, request.logits_soft_cap, host.device):
            yield problem
        if request.sliding_window is not None and request.kv_cache_dtype == "fp8_e4m3":
            yield f"decode=xqa: it {XQA_WINDOW_FP8}"
        if "lse" in request.features:
            yield "decode=xqa: it returns no log-sum-exp"
    elif kernel == "cuda_cores" and (problem := cuda_core_problem(group)):
        yield problem
