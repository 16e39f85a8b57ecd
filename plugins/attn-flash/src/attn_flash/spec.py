"""The spec of the backend ``flash``: what each generation can do, on which device, and what this build of it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from attn_flash import paged_head_sizes, probe_results
from attn_flash.probe_results import ProbeResult
from attncore import AttentionRequest, BackendSpec, Host, MultipleOf, Option, Reason, Variant

Check = Callable[[AttentionRequest, Host], Iterator[Reason]]

_COMMON = {
    "sliding_window", "logits_soft_cap", "encoder", "encoder_decoder", "multi_token_decode", "strided_kv_cache", "lse",
}  # fmt: skip
_SCALES = {"kv_scales", "kv_scales_on_device", "kv_scales_per_head"}
_FEATURES = {
    "2": {*_COMMON, "alibi", "alibi_standard"},
    "3": {*_COMMON, *_SCALES},
    "3_vllm": {*_COMMON, *_SCALES, "sinks"},
    "4": {*_COMMON, "sinks"},
}
_NO_SLOPES = "the kernel takes no slopes; fa2 does"
_NO_MASK = "it takes no mask"
_UNSUPPORTED = {
    "2": {
        "sinks": "the kernel has no place for them; fa4 has",
        "kv_scales": "flash-attn 2 reads caches of the query's dtype alone, float16 or bfloat16, and has no fp8",
        "tree_mask": _NO_MASK,
        "bidirectional_spans": _NO_MASK,
    },
    "3": {
        "alibi": _NO_SLOPES,
        "alibi_standard": _NO_SLOPES,
        "sinks": "the package's kernels have no place for them; vLLM's build of them has, and fa4",
        "tree_mask": _NO_MASK,
        "bidirectional_spans": _NO_MASK,
    },
    "3_vllm": {
        "alibi": _NO_SLOPES,
        "alibi_standard": _NO_SLOPES,
        "tree_mask": _NO_MASK,
        "bidirectional_spans": _NO_MASK,
    },
    "4": {
        "alibi": _NO_SLOPES,
        "alibi_standard": _NO_SLOPES,
        "kv_scales": "the kernel reads fp8 keys with fp8 queries only, and not on sm_90",
        "tree_mask": _NO_MASK,
        "bidirectional_spans": _NO_MASK,
    },
}
_DEVICES = {"cuda:sm_80+": 55, "cuda:sm_90": 60, "cuda:sm_100+": 60}
_BEFORE_FLASHINFER = (
    "on sm_90 before flashinfer: 32 layers take 28.2 ms for a prefill of 8192 and 5.3 for 64 decodes, with flashinfer "
    "56.3 and 6.0, but 1.6 for 8 decodes, with flashinfer 1.4 (one H200, 2026-11-22)"
)
_GENERATION3_FIRST = (
    "fa3 on sm_90 before flashinfer: 32 layers take 27.4 ms for a prefill of 8192, 5.2 for 64 decodes, 1.5 for 8, with "
    "flashinfer 55.9, 5.4 and 1.2, with fa4 29.2, 5.2 and 1.6 (one H200, 2026-11-26)"
)
_AFTER_FLASHINFER = (
    "fa2 on sm_90 after flashinfer: 32 layers take 2.3 ms for 8 decodes, 6.5 for 64, 12.1 for a mixed step, "
    "with flashinfer 1.4, 6.0 and 11.1, its plan on the host counted (one H200, 2026-11-22)"
)
_GENERATION3 = {
    "devices": {"cuda:sm_90": 60},
    "cuda_graph": "always",
    "kv_cache_dtypes": {"auto", "fp8_e4m3"},
    "block_sizes": MultipleOf(1),
    "preferred_block_size": 16,
    "finite_tail": True,  # a whole page is multiplied, by weights of 0 behind the last key
    "finite_passed_blocks": True,
    "notes": (_GENERATION3_FIRST, "over an fp8 cache queries are rounded to fp8 too, and cut off at 448"),
}
_PAGES = {
    "3": _GENERATION3,
    "3_vllm": _GENERATION3,
    "2": {
        "devices": _DEVICES | {"cuda:sm_90": 53},  # flashinfer has 55 there
        "block_sizes": MultipleOf(256),
        "preferred_block_size": 256,
        "notes": (_AFTER_FLASHINFER,),
    },
    "4": {
        "cuda_graph": "always",
        "head_sizes": paged_head_sizes.PAGED,
        "block_sizes": MultipleOf(16),
        "preferred_block_size": 128,
        "finite_tail": True,
        # A tile of keys may begin in a block before the window. Generation 2's do not: its blocks are whole tiles.
        "finite_passed_blocks": True,
        "pad_seq_len": 1,
        "compiles_at_run_time": True,
        "notes": (
            _BEFORE_FLASHINFER,
            "on sm_90 fa4 does not split the keys of few long requests among the cores (no split-KV)",
        ),
    },
}
_REQUIRES = {
    "2": "flash-attn>=2.8,<2.9",
    "3": "flash-attn-3>=3.0.0b1,<4",
    "3_vllm": "vllm>=0.32,<0.34",
    "4": "flash-attn-4>=4.0.0b36,<5",
}
_SIZES = MultipleOf(8, 256)
LATENT_SUFFIX = "_latent"
"""Of the variants that read latent caches."""
LATENT_ROW, LATENT_VALUES = 576, 512
"""Columns of a latent row, and those of them that are its values too."""
LATENT_WORKSPACE = 64 << 20
"""Bytes of partial outputs over latent caches at most, float32 of each part of a row's keys. More makes no step faster,
and 256 decodes of 128 heads slower (docs/design/flash-attention-3.md)."""
_LATENT_FIRST = (
    "latent caches: on sm_90 before flashinfer, which plans on the host: 32 layers of 16 heads take 0.9 ms for 8 "
    "decodes, 3.2 for 64, 8.9 for 32 beside prefills of 3,584 tokens, with flashinfer 1.3, 3.5 and 8.6; of 128 heads "
    "1.2, 4.7 and 62, with flashinfer 1.6, 5.0 and 54 (one H100, 2026-11-28)"
)
_LATENT_DECODER = "a latent cache is for causal layers"
_LATENT_FACTS = {
    **_GENERATION3,
    "factory": "attn_flash.latent:LatentBackend",
    "use_mla": True,
    "mla_only": True,
    "kv_cache_dtypes": {"auto"},
    "head_sizes": {LATENT_ROW},
    "head_size_v": {LATENT_VALUES},
    "kv_cache_layouts": ("NHD",),
    "preferred_block_size": 64,
    "workspace_bytes": LATENT_WORKSPACE,
    "features": {"sliding_window", "logits_soft_cap", "multi_token_decode", "lse"},
    "unsupported": {
        "alibi": "the kernel takes no slopes",
        "alibi_standard": "the kernel takes no slopes",
        "sinks": "the operator takes none where values have another size than keys",
        "kv_scales": "the kernel reads latent rows of 16 bits alone",
        "strided_kv_cache": "a latent cache is whole",
        "encoder": _LATENT_DECODER,
        "encoder_decoder": _LATENT_DECODER,
        "tree_mask": _NO_MASK,
        "bidirectional_spans": _NO_MASK,
    },
    "notes": (_LATENT_FIRST,),
}
MOST_SINKS = 64
"""Query heads of a layer with sinks, over generation 3."""
_FIX = "install another build of it, or use another backend"


def make_spec() -> BackendSpec:
    """In the order of ``DISTRIBUTIONS``: where several fit, the first is the fastest in the steps of README.md."""
    return BackendSpec(
        name="flash",
        api=1,
        factory="attn_flash.backend:FlashBackend",
        devices=_DEVICES,
        dtypes=probe_results.DTYPES,
        head_sizes=_SIZES,
        block_sizes=MultipleOf(16),
        kv_cache_layouts=("NHD", "HND"),
        cuda_graph="uniform",
        host_needs={
            "query_start_loc", "context_lens", "seq_lens", "slot_mapping", "block_table", "encoder_seq_lens",
            "encoder_query_start_loc",
        },
        device_needs={
            "slot_mapping", "block_table", "query_start_loc", "seq_lens", "seq_start_loc", "cross_slot_mapping",
            "cross_block_table", "encoder_seq_lens", "encoder_query_start_loc", "encoder_seq_start_loc",
            "token_to_req_indices",  # the log-sum-exp of slopes, and rows that are lent a key
        },
        host_lengths="bounded",
        requires=("torch>=2.7",),
        install={
            "flash-attn-3": "build it from FlashAttention's sources (hopper), or install vLLM, whose wheel carries it",
            "vllm": "install vLLM, whose wheel for CUDA carries FlashAttention 3",
        },
        options={"generation": Option(str, "use this generation or none", choices=("2", "3", "4"))},
        variants=(
            *(_variant(generation, _plain_facts(generation)) for generation in probe_results.DISTRIBUTIONS),
            *(_variant(generation, _LATENT_FACTS, LATENT_SUFFIX) for generation in ("3", "3_vllm")),
        ),
    )  # fmt: skip


def _plain_facts(generation: str) -> dict[str, Any]:
    return {**_PAGES[generation], "features": _FEATURES[generation], "unsupported": _UNSUPPORTED[generation]}


def _variant(generation: str, given: Mapping[str, Any], suffix: str = "") -> Variant:
    """What a generation can do over the kind of cache that ``given`` states the facts of, less what its build lacks."""
    found = probe_results.read(generation)  # what a build leaves out it lacks on every device
    facts = dict(given)
    if found is not None and not found.fails:
        lacks = found.missing("")
        facts["features"] = facts["features"] - lacks.keys()
        facts["unsupported"] = facts["unsupported"] | {name: _left_out(found, text) for name, text in lacks.items()}
        facts["dtypes"] = [name for name in probe_results.DTYPES if name not in found.missing("dtype")]
        if "kv_cache_dtypes" in facts:
            facts["kv_cache_dtypes"] = facts["kv_cache_dtypes"] - found.missing("kv_cache_dtype").keys()
        if found.head_sizes and not facts.get("use_mla"):
            facts["head_sizes"] = [size for size in probe_results.HEAD_SIZES if size not in found.head_sizes]
    check = partial(_check, generation, found)
    return Variant(f"fa{generation}{suffix}", requires=(_REQUIRES[generation],), check=check, **facts)


def _left_out(found: ProbeResult, text: str) -> str:
    return f"this build of {found.library} leaves it out, as a call on {found.device} showed ({text})"


def _check(generation: str, known: ProbeResult | None, request: AttentionRequest, host: Host) -> Iterator[Reason]:
    """What no field of the spec says: facts of an architecture, the generation asked for, what calls have shown."""
    distribution = probe_results.DISTRIBUTIONS[generation]
    source = f"{distribution} {host.packages.get(distribution, '')}".strip()
    asked = request.options.get("flash", {}).get("generation")
    if asked in ("2", "3", "4") and asked != generation[0]:
        message = f"the options ask for generation {asked}"
        yield Reason("option", message, asked, generation[0], "attn-flash", "leave options['flash']['generation'] out")
    if generation == "4":
        yield from _architecture(request, host, source)
    elif generation.startswith("3"):
        yield from _generation3(generation, request, host, source)
    yield from _shown(generation, known, request, host, source)


def _architecture(request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    family = _family(host)
    if family in (8, 12):
        message = f"no paged cache is read on {host.arch}; supported: sm_90, sm_100, sm_103, sm_110"
        yield Reason("device", message, host.device, ["cuda:sm_90", "cuda:sm_100"], source, "use fa2 (flash-attn)")
    if "encoder_decoder" in request.asked_features and request.head_size in paged_head_sizes.CAUSAL_ONLY:
        sizes = [size for size in paged_head_sizes.PAGED if size not in paged_head_sizes.CAUSAL_ONLY]
        message = f"head_size {request.head_size}: an encoder's keys are read wrong from pages"
        yield Reason("head_size", message, request.head_size, sizes, source, "use fa2 (flash-attn)")
    if family in (10, 11) and request.head_size > 128 and request.head_size != 256:
        message = f"head_size {request.head_size} not supported on {host.arch}; supported: to 128, 256"
        yield Reason("head_size", message, request.head_size, [128, 256], source, "use fa2 (flash-attn)")


def _family(host: Host) -> int:
    """Major compute capability; 0 where there is none."""
    digits = host.arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]) if host.platform == "cuda" and digits.isdigit() else 0


def _generation3(generation: str, request: AttentionRequest, host: Host, source: str) -> Iterator[Reason]:
    if generation == "3_vllm" and not host.assumed and host.packages.get("vllm") and not _has_library(generation):
        message = "this vLLM was installed without its library of FlashAttention 3"
        yield Reason("check", message, None, None, source, "install vLLM's wheel for CUDA, or flash-attn-4 (fa4)")
    for field, message in fp8_problems(request.kv_cache_dtype, request.dtype, request.head_size).items():
        fix = "use a cache of dtype 'auto'"
        yield Reason(field, f"{field} {message}", getattr(request, field), None, source, fix)
    if "sinks" in request.asked_features and request.num_heads > MOST_SINKS:
        message = f"num_heads {request.num_heads}: with sinks it takes {MOST_SINKS} at most"
        yield Reason("check", message, request.num_heads, MOST_SINKS, source, "use fa4 (flash-attn-4)")


def fp8_problems(kv_cache_dtype: str, dtype: str, head_size: int) -> dict[str, str]:
    """Why generation 3 does not run over an fp8 cache: field -> what was found, and what it takes. Empty for others."""
    found = {}
    if kv_cache_dtype == "fp8_e4m3" and dtype != "bfloat16":
        found["dtype"] = f"{dtype}: over an fp8 cache its output is bfloat16"
    if kv_cache_dtype == "fp8_e4m3" and head_size % 16:
        found["head_size"] = f"{head_size}: over an fp8 cache it takes multiples of 16"
    return found


def _has_library(generation: str) -> bool:
    return probe_results.library_file(generation) is not None


def _shown(
    generation: str, known: ProbeResult | None, request: AttentionRequest, host: Host, source: str
) -> Iterator[Reason]:
    """What calls have shown of the library installed here, where the host has that one."""
    found = probe_results.read(generation, host.device_name) or probe_results.read(generation)
    if found is None or found.library != source:
        return
    if found.fails and host.device_name not in ("", found.device):  # what another device showed of itself
        return
    if found.fails:
        message = f"{found.library} failed when it was called on {found.device}: {found.fails}"
        yield Reason("check", message, None, None, source, "repair it, then run `python -m attn_flash`")
        return
    if request.use_mla and probe_results.LATENT in found.lacks:
        yield Reason(
            "check", f"use_mla: {_left_out(found, found.lacks[probe_results.LATENT])}", True, None, source, _FIX
        )
    size = str(request.head_size)
    if size in found.missing("head_size"):
        message = f"head size {size}: {_left_out(found, found.missing('head_size')[size])}"
        yield Reason("check", message, request.head_size, None, source, _FIX)
    if known == found:  # the spec has the rest of it
        return
    for name, text in {**found.missing("dtype"), **found.missing("kv_cache_dtype"), **found.missing("")}.items():
        if name in (request.dtype, request.kv_cache_dtype, *request.asked_features):
            yield Reason("check", f"{name}: {_left_out(found, text)}", name, None, source, _FIX)
