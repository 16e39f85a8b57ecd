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


XQA = "xqa"
XQA_VARIANTS = ("xqa_built", "xqa_jit")
"""Variants whose decodes of one token run by XQA where the option asks for nothing else."""
XQA_WINDOW_FP8 = "has not been shown right for windows over an fp8 cache"
XQA_E5M2 = "decode=xqa: a cache of fp8_e5m2; of fp8 its kernel reads e4m3, and takes other bytes for numbers of 16 bits"


LATENT_SIZES = (576, 512)
"""Of a latent row, and of its part that is the values, in the models that are served: DeepSeek's and their like."""


def built(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against the variant that compiles nothing: a module that the request needs is not built."""
    yield from _both(request, host)
    yield from _not_built(needed(request), host)


def compiled(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against the variant that compiles: no compiler."""
    yield from _both(request, host)
    yield from _no_compiler(host)


def xqa_built(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against decodes by XQA that compile nothing."""
    yield from _by_itself(request)
    yield from _not_built(needed(request, XQA), host)


def xqa_compiled(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against decodes by XQA that compile."""
    yield from _by_itself(request)
    yield from _no_compiler(host)


def _by_itself(request: AttentionRequest) -> Iterator[str]:
    """Why XQA is not what the request is given where it asks for no kernel."""
    asked = _asked_decode(request)
    if asked not in ("auto", XQA):
        yield why_not_xqa(asked)


def why_not_xqa(asked: str) -> str:
    """Why a variant of XQA is not for a request of another kernel, as a sentence."""
    return f"decode={asked}: asked for; this variant is that of XQA"


def latent_built(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against the variant of latent caches that compiles nothing."""
    yield from _latent(request, host)
    yield from _not_built(needed_latent(request, host), host)


def latent_compiled(request: AttentionRequest, host: Host) -> Iterator[str | Reason]:
    """Reasons against the variant of latent caches that compiles."""
    yield from _latent(request, host)
    yield from _no_compiler(host)


def _not_built(names: list[str], host: Host) -> Iterator[str | Reason]:
    if host.platform != "cuda":
        return
    if host.assumed:
        yield "which modules are built cannot be seen for an assumed host"
        return
    architecture = host.device.rpartition("sm_")[2]
    missing = [name for name in names if modules.find(name, architecture) is None]
    if missing:
        yield Reason("compiler", f"{len(missing)} of the modules needed are not built ahead, first {missing[0]}")


def _no_compiler(host: Host) -> Iterator[Reason]:
    if not host.assumed and host.platform == "cuda" and (why := modules.no_compiler()):
        yield Reason("compiler", f"modules have to be compiled, but {why}", fix=INSTALL)


def _has_names(request: AttentionRequest) -> bool:
    """Whether FlashInfer has names for the request's dtypes."""
    return {request.dtype, modules.cached(request.dtype, request.kv_cache_dtype)} <= modules.SHORT.keys()


def needed_latent(request: AttentionRequest, host: Host) -> list[str]:
    """The module that layers over a latent cache load; none for dtypes that FlashInfer lacks."""
    if not _has_names(request):
        return []
    sizes = request.head_size, request.head_size_v or request.head_size
    return [modules.latent(request.dtype, request.kv_cache_dtype, *sizes, _asked_latent(request, host))]


def latent_kernels(asked: str, *, hopper: bool) -> str:
    """What the option ``latent`` comes to: FlashInfer's own order."""
    return ("fa3" if hopper else "fa2") if asked == "auto" else asked


def latent_problem(
    num_heads: int, sizes: tuple[int, int], dtypes: tuple[str, str], kernels: str, *, hopper: bool
) -> str:
    """Why ``kernels`` cannot run layers over a latent cache, as a sentence that begins with the field; empty where they
    can. ``sizes`` are of a row and of its values, ``dtypes`` the model's and the cache's."""
    if sizes != LATENT_SIZES:
        return (
            f"head_size_v: {sizes[1]} of {sizes[0]} found; flashinfer reads latent rows of {LATENT_SIZES[0]}, of "
            f"which the first {LATENT_SIZES[1]} are the values"
        )
    if num_heads > 128 or num_heads & (num_heads - 1):
        return (
            f"num_heads: {num_heads} found; over latent caches flashinfer takes 1, 2, 4 and so on to 128, for of "
            "other numbers its kernels would leave out keys of some prompts, which it refuses"
        )
    if kernels == "fa3" and not hopper:
        return "options: latent=fa3 runs on sm_90 alone"
    if dtypes[1] == "fp8_e4m3" and (not hopper or dtypes[0] != "bfloat16"):
        return "kv_cache_dtype: fp8_e4m3 found; latent caches of it are read on sm_90 alone, by models in bfloat16"
    return ""


def _asked_latent(request: AttentionRequest, host: Host) -> str:
    asked = str(request.options.get("flashinfer", {}).get("latent", "auto"))
    return latent_kernels(asked, hopper=host.device == "cuda:sm_90")


def _latent(request: AttentionRequest, host: Host) -> Iterator[str]:
    if not request.use_mla:
        return  # the spec says so
    yield from _unlike(request)
    sizes, dtypes = (
        (request.head_size, request.head_size_v or request.head_size),
        (request.dtype, request.kv_cache_dtype),
    )
    hopper = host.device == "cuda:sm_90"
    if problem := latent_problem(request.num_heads, sizes, dtypes, _asked_latent(request, host), hopper=hopper):
        yield problem


def needed(request: AttentionRequest, kernel: str = "") -> list[str]:
    """The modules that layers with the request's window and soft cap load, whose decodes ``kernel`` runs, by default
    what the option asks for; none for dtypes that FlashInfer lacks."""
    if not _has_names(request):
        return []
    group = request.num_heads // request.num_kv_heads
    return modules_of(
        (request.dtype, request.kv_cache_dtype, request.head_size),
        kernel or decode_kernel(request, group),
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
    asked = _asked_decode(request)
    return automatic(group) if asked == "auto" else asked


def _asked_decode(request: AttentionRequest) -> str:
    return str(request.options.get("flashinfer", {}).get("decode", "auto"))


def automatic(group: int, variant: str = "") -> str:
    """The kernel of decodes where none is asked for: the faster one in the measurements of README.md."""
    return XQA if variant in XQA_VARIANTS else "tensor_cores"


def xqa_problem(group: int, page: int, soft_cap: float | None, kv_cache_dtype: str, device: str) -> str:
    """Why XQA cannot run such layers, as a sentence; empty where it can."""
    if device not in ("cuda:sm_90", "cuda:sm_120"):
        return f"decode=xqa: it runs on sm_90 and sm_120, not on {device}"
    if page not in modules.XQA_PAGES:
        return f"decode=xqa: block_size {page}; it takes {', '.join(map(str, modules.XQA_PAGES))}"
    if group > 32:
        return f"decode=xqa: {group} query heads over one; it takes 32"
    if soft_cap is not None:
        return "decode=xqa: it has no logits_soft_cap"
    if kv_cache_dtype == "fp8_e5m2":
        return XQA_E5M2
    return ""


def cuda_core_problem(group: int) -> str:
    """Why the CUDA-core kernel cannot run such groups, as a sentence; empty where it can."""
    taken = (1, 2, 3, 4, 6, 8, 16)
    if group in taken:
        return ""
    return f"decode=cuda_cores: groups of {group} heads; it takes {', '.join(map(str, taken))}"


def _unlike(request: AttentionRequest) -> Iterator[str]:
    if request.kv_cache_dtype in ("float16", "bfloat16") and request.kv_cache_dtype != request.dtype:
        yield f"kv_cache_dtype {request.kv_cache_dtype} beside dtype {request.dtype}: only fp8 may differ"


def _both(request: AttentionRequest, host: Host) -> Iterator[str]:
    yield from _unlike(request)
    group = request.num_heads // request.num_kv_heads
    kernel = decode_kernel(request, group)
    if kernel == "xqa":
        page, soft_cap = request.block_size or 16, request.logits_soft_cap
        if problem := xqa_problem(group, page, soft_cap, request.kv_cache_dtype, host.device):
            yield problem
        if request.sliding_window is not None and request.kv_cache_dtype == "fp8_e4m3":
            yield f"decode=xqa: it {XQA_WINDOW_FP8}"
        if "lse" in request.features:
            yield "decode=xqa: it returns no log-sum-exp"
        if "kv_scales_per_head" in request.features:
            yield "decode=xqa: it reads one scale for all heads"
    elif kernel == "cuda_cores" and (problem := cuda_core_problem(group)):
        yield problem
