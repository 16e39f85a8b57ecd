"""The spec: seven variants, what each can do, and why each of them may not be taken. No torch, no Triton here."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

from attn_rocm import settings
from attn_rocm.tiles import AMD, capability, known
from attncore import AttentionRequest, BackendSpec, Host, MultipleOf, Option, Reason, Variant

NAME = "rocm"
AMD_DEVICES = {f"rocm:{name}": 60 for name in AMD}
ON_NVIDIA = 30
"""Behind flash and flashinfer, which have 50 and more: their kernels are made for these GPUs."""
FEATURES = frozenset((
    "sliding_window", "logits_soft_cap", "alibi", "sinks", "kv_scales", "kv_scales_on_device", "kv_scales_per_head",
    "encoder", "encoder_decoder", "multi_token_decode", "tree_mask", "bidirectional_spans", "strided_kv_cache",
    "lse",
))  # fmt: skip
"""Of the plugin's own kernels."""
TURING = "sm_75: Triton compiles for it, without tensor cores, and no longer says that it supports it"
TRITON = ("triton", "pytorch-triton-rocm", "triton-rocm")
"""Distributions that provide Triton: torch's wheels for ROCm bring one under another name."""
OLDEST_TRITON = (3, 6)
"""Of the plugin's own kernels: 3.4 and 3.5 end in an error while they compile windows beside spans, and 3.2 in an
assertion of LLVM's, which ends the process.
"""
AITER, CK_FLASH = "amd-aiter>=0.1.7.dev0", "flash-attn>=2.8,<3"
TRITON_BUILD = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
ONLY_ASKED = {
    "aiter_paged": "aiter's decode kernel has not been compared with its unified one here",
    "ck": "flash-attn reads no pages here: it runs whole prompts only",
}

_OF_LIBRARIES = {
    "aiter": ("gfx942", "gfx950"),
    "aiter_paged": ("gfx942", "gfx950"),
    "ck": ("gfx90a", "gfx942", "gfx950"),
}
"""AMD's libraries -> the GPUs that each is for."""

Check = Callable[[AttentionRequest, Host], Iterator[Reason]]


def make_spec() -> BackendSpec:
    """The facts. ValueError where one of the plugin's environment variables makes no sense."""
    developing = settings.dev_device()
    settings.kernel()
    beside = {settings.DEV_DEVICES["cpu"]: 1} if developing == "cpu" else {}
    return BackendSpec(
        name=NAME,
        api=1,
        factory="attn_rocm.triton_backend:TritonBackend",
        devices=AMD_DEVICES | beside,
        dtypes={"float16", "bfloat16", "float32"},
        kv_cache_dtypes={"auto", "fp8_e4m3", "fp8_e5m2"},
        kv_cache_layouts=("NHD", "HND"),
        head_sizes=MultipleOf(8, 256),
        block_sizes=MultipleOf(1),
        preferred_block_size=16,
        features=FEATURES,
        device_needs={
            "slot_mapping", "block_table", "query_start_loc", "seq_lens", "cross_slot_mapping", "cross_block_table",
            "encoder_seq_lens", "encoder_query_start_loc", "tree_mask", "span_ends",
        },
        cuda_graph="always",
        compiles_at_run_time=True,
        variables=settings.VARIABLES,
        options={
            "kernel": Option(
                str,
                "which kernels: auto takes aiter where it is installed and can be imported, then the plugin's own "
                "Triton kernels, then torch's scaled_dot_product_attention where there is no Triton",
                default="auto",
                choices=settings.KERNELS,
            )
        },
        variants=(_aiter(), _aiter_paged(), _ck(), *_triton(beside), _sdpa(developing)),
    )  # fmt: skip


def _devices(library: str, priority: int) -> dict[str, int]:
    return {f"rocm:{name}": priority for name in _OF_LIBRARIES[library]}


def _aiter() -> Variant:
    return Variant(
        "aiter",
        requires=(AITER,),
        factory="attn_rocm.aiter_backend:AiterBackend",
        devices=_devices("aiter", 70),
        dtypes={"float16", "bfloat16"},
        kv_cache_dtypes={"auto"},
        head_sizes={64, 128, 256},
        block_sizes={16, 32, 64, 128},
        features={"sliding_window", "logits_soft_cap", "alibi", "sinks", "multi_token_decode", "strided_kv_cache"},
        unsupported={
            "encoder": "aiter's unified_attention is causal only",
            "encoder_decoder": "aiter's unified_attention is causal only",
            "lse": "aiter's unified_attention returns the output only",
            "kv_scales": "its reading of an fp8 cache could not be verified",
            "tree_mask": "the plugin hands no mask to aiter",
            "bidirectional_spans": "the plugin hands no mask to aiter",
        },
        finite_tail=True,  # where a tile is a block, rows of a last block are read whole and multiplied by 0
        finite_passed_blocks=True,  # a tile may begin before the window
        check=_check("aiter", _has_triton, _aiter_imports),
    )


def _aiter_paged() -> Variant:
    return Variant(
        "aiter_paged",
        requires=(AITER,),
        factory="attn_rocm.aiter_backend:AiterPagedBackend",
        devices=_devices("aiter_paged", 65),
        dtypes={"float16", "bfloat16"},
        kv_cache_dtypes={"auto"},
        head_sizes={64, 128},
        block_sizes={16, 32},
        features={"logits_soft_cap", "alibi"},
        unsupported={
            "strided_kv_cache": "strides of aiter's paged kernel could not be verified",
            "sliding_window": "windows of aiter's paged kernel could not be verified",
            "sinks": "aiter's paged kernel takes none",
            "encoder": "aiter's paged kernel reads a cache only",
            "encoder_decoder": "aiter's paged kernel reads a cache only",
            "lse": "aiter's paged kernel returns the output only",
            "kv_scales": "its reading of an fp8 cache could not be verified",
            "multi_token_decode": "aiter's paged kernel is given one query a request",
            "tree_mask": "the plugin hands no mask to aiter",
            "bidirectional_spans": "the plugin hands no mask to aiter",
        },
        max_group_size=16,
        max_model_len=32768,
        max_block_id=65535,  # aiter's assembly kernel is wrong above it, and which kernel runs is aiter's decision
        finite_tail=True,
        cuda_graph="uniform_decode",
        check=_check("aiter_paged", _has_triton, _aiter_imports),
    )


def _ck() -> Variant:
    return Variant(
        "ck",
        requires=(CK_FLASH,),
        factory="attn_rocm.ck_backend:CkBackend",
        devices=_devices("ck", 55),
        dtypes={"float16", "bfloat16"},
        kv_cache_dtypes={"auto"},
        features={"sliding_window", "logits_soft_cap", "alibi", "multi_token_decode", "strided_kv_cache"},
        unsupported={
            "sinks": "flash-attn 2 has no place for them",
            "encoder": "the Triton kernels do that alone",
            "encoder_decoder": "the Triton kernels do that alone",
            "lse": "the Triton kernels do that alone",
            "kv_scales": "the Triton kernels do that alone",
            "tree_mask": "flash-attn takes no mask",
            "bidirectional_spans": "flash-attn takes no mask",
        },
        host_needs={"context_lens"},
        host_lengths="bounded",  # whether a prompt has a context, which a bound says too
        check=_check("ck", _is_ck, _has_triton),
    )


def _triton(beside: dict[str, int]) -> Iterator[Variant]:
    """A form for each set of dtypes: before sm_89 Triton converts nothing to fp8, before sm_80 there is no bfloat16."""
    yield Variant(
        "triton",
        devices=AMD_DEVICES | {"cuda:sm_89+": ON_NVIDIA} | beside,
        check=_check("triton", _has_triton),
    )
    for name, devices, dtypes, notes in (
        ("triton_no_fp8", ("sm_80", "sm_86", "sm_87", "sm_88"), {"float16", "bfloat16", "float32"}, ()),
        ("triton_no_bf16", ("sm_75",), {"float16", "float32"}, (TURING,)),
    ):
        yield Variant(
            name,
            devices={f"cuda:{device}": ON_NVIDIA for device in devices},
            dtypes=dtypes,
            kv_cache_dtypes={"auto"},
            unsupported={"kv_scales": "Triton converts to fp8 from sm_89 on"},
            features=FEATURES - {"kv_scales", "kv_scales_on_device", "kv_scales_per_head"},
            notes=notes,
            check=_check(name, _has_triton),
        )


def _sdpa(developing: str | None) -> Variant:
    return Variant(
        "sdpa",
        factory="attn_rocm.sdpa_backend:SdpaBackend",
        devices=AMD_DEVICES if developing is None else AMD_DEVICES | {settings.DEV_DEVICES[developing]: 1},
        features={
            "sliding_window", "alibi", "kv_scales", "kv_scales_on_device", "kv_scales_per_head", "multi_token_decode",
            "strided_kv_cache",
        },
        unsupported={
            "logits_soft_cap": "torch's scaled_dot_product_attention has none",
            "sinks": "torch's scaled_dot_product_attention has no place for them",
            "lse": "torch's scaled_dot_product_attention returns the output only",
            "encoder": "the Triton kernels do that",
            "encoder_decoder": "the Triton kernels do that",
            "tree_mask": "the plugin takes no mask",
            "bidirectional_spans": "the plugin takes no mask",
        },
        cuda_graph="never",
        host_needs={"query_start_loc", "seq_lens", "slot_mapping"},
        device_needs={"slot_mapping", "block_table"},
        host_lengths="exact",
        compiles_at_run_time=False,
        check=_check("sdpa"),
    )  # fmt: skip


def _check(variant: str, *others: Check) -> Check:
    """Whether this variant is asked for, and the checks that only it has. A partial, which pickles, and no closure."""
    return partial(_reasons, variant, others)


def _reasons(variant: str, others: tuple[Check, ...], request: AttentionRequest, host: Host) -> Iterator[Reason]:
    if not _for_device(variant, host):
        return  # the device is reason enough
    given = request.options.get(NAME, {}).get("kernel")
    asked = settings.kernel() if given is None else given
    if asked == "auto":
        if variant in ONLY_ASKED:
            yield _not_taken(variant, asked, ONLY_ASKED[variant])
        elif variant == "sdpa" and not any(_has_triton(request, host)):
            yield _not_taken(variant, asked, "Triton is there")
    elif asked != (wanted := settings.kernel_of(variant)):
        who = f"the environment variable {settings.KERNEL}" if given is None else "the request's option kernel"
        yield Reason(
            "option", f"variant {variant}: {who} asks for {asked}", asked, [wanted, "auto"], "attn-rocm",
            f"ask for kernel {wanted}, or for auto",
        )  # fmt: skip
    for other in (_has_torch, *others):
        yield from other(request, host)


def _for_device(variant: str, host: Host) -> bool:
    """Whether ``host`` has one of a variant's devices."""
    if variant in _OF_LIBRARIES:
        return host.arch in _OF_LIBRARIES[variant]
    if variant == "sdpa" and settings.dev_device() is not None:
        return True
    if (number := capability(host.arch)) is not None:
        return variant == ("triton_no_bf16" if number < 80 else "triton_no_fp8" if number < 89 else "triton")
    if host.platform == "cpu":
        return settings.dev_device() is not None
    return variant not in settings.FORMS and known(host.arch) is not None


def _not_taken(variant: str, asked: str, why: str) -> Reason:
    message = f"variant {variant}: taken only where kernel {variant} is asked for, since {why}"
    return Reason("option", message, asked, [variant], "attn-rocm", f"ask for kernel {variant}")


def _has_torch(request: AttentionRequest, host: Host) -> Iterator[Reason]:
    # Not among the spec's requirements: a variant is called by the library that it requires, and torch is none.
    if not version_on(host, "torch"):
        yield _missing("torch", "torch>=2.7", "")


def _has_triton(request: AttentionRequest, host: Host) -> Iterator[Reason]:
    """Whether a Triton is there that compiles the plugin's own kernels, which the variants of libraries run, too."""
    wanted = f"triton>={OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}"
    found = {name: version for name in TRITON if (version := version_on(host, name))}
    if not found:
        yield _missing("triton", wanted, ", or ask for kernel sdpa")
    for name, version in found.items():
        number = re.match(r"(\d+)\.(\d+)", version)
        if number and (int(number[1]), int(number[2])) < OLDEST_TRITON:
            yield Reason(
                "requirement", f"{name} {version} is installed; attn-rocm needs {wanted}", wanted, version,
                "attn-rocm", f"take a torch that brings {wanted}, or ask for kernel sdpa",
            )  # fmt: skip


def _missing(name: str, wanted: str, otherwise: str) -> Reason:
    message = f"{name} is not installed; attn-rocm needs {wanted}"
    return Reason("requirement", message, wanted, None, "attn-rocm", f"pip install '{wanted}'{otherwise}")


def version_on(host: Host, name: str) -> str:
    """The version of a distribution on ``host``: as it states, else as it is here; empty: not installed."""
    stated = host.packages.get(name)
    if stated is not None:
        return str(stated)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _aiter_imports(request: AttentionRequest, host: Host) -> Iterator[Reason]:
    """Without ROCm aiter raises RuntimeError: it is tried where the host is this machine, and where it could run."""
    if host.assumed or host.arch not in _OF_LIBRARIES["aiter"] or not version_on(host, "amd-aiter"):
        return
    if why := import_problem("aiter.ops.triton.unified_attention"):
        yield Reason(
            "check", f"amd-aiter {version_on(host, 'amd-aiter')} cannot be imported: {why}", None, None, "attn-rocm",
            "install the amd-aiter that was made for this ROCm and this torch, or leave it out",
        )  # fmt: skip


@lru_cache(maxsize=8)
def import_problem(module: str) -> str:
    """Why ``module`` cannot be imported, in one line; empty where it can. Kept for the process."""
    try:
        importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a library may raise anything, SystemExit too
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _is_ck(request: AttentionRequest, host: Host) -> Iterator[Reason]:
    value: Any = os.environ.get(TRITON_BUILD, "")
    if not host.assumed and value.upper() == "TRUE":
        yield Reason(
            "check", f"{TRITON_BUILD}={value} makes flash-attn its Triton build, which ignores block tables in silence "
            "(2.8.3.post2) and is not what this variant is for", value, ["", "FALSE"], "attn-rocm",
            f"unset {TRITON_BUILD}",
        )  # fmt: skip
