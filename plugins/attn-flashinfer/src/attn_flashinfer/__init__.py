"""The attention backend flashinfer: what it is. Light: no torch and no FlashInfer here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn_flashinfer import checks, modules
from attncore import BackendSpec, MultipleOf, Option, Variant, hookimpl

if TYPE_CHECKING:
    from attncore import Host

NO_SPANS = "the plugin gives its kernels masks of draft trees alone"

REQUIRES = ("torch>=2.7", "apache-tvm-ffi>=0.1.11", "flashinfer-python>=0.7.2,<0.8")

OPTIONS = {
    "decode": Option(
        str,
        "kernel of decodes of one token; auto is the faster of the first two, xqa plans nothing",
        default="auto",
        choices=("auto", "tensor_cores", "cuda_cores", "xqa"),
    ),
    "plan": Option(
        str,
        "where captured decodes are planned; auto is device where its plans prove to be FlashInfer's own",
        default="auto",
        choices=("auto", "device", "host"),
    ),
    "plan_branch": Option(
        bool, "the kernel that plans a captured decode runs beside what comes before its first attention", default=False
    ),
    "cascade": Option(bool, "read a prefix that many requests share once, in steps without a graph", default=False),
    "workspace_mib": Option(int, "MiB of device memory for split contexts, at first", default=64),
    "max_workspace_mib": Option(int, "MiB beyond which a plan is an error", default=1024),
}


LATENT_OPTIONS = {
    "latent": Option(
        str,
        "generation of the kernels over latent caches; auto is fa3 on sm_90, fa2 elsewhere",
        default="auto",
        choices=("auto", "fa2", "fa3"),
    ),
    **{name: OPTIONS[name] for name in ("workspace_mib", "max_workspace_mib")},
}


@hookimpl
def attncore_backend() -> BackendSpec:
    """The facts by which attncore chooses, and which its conformance kit probes."""
    return BackendSpec(
        name="flashinfer",
        api=1,
        factory="attn_flashinfer.backend:FlashInferBackend",
        devices={"cuda:sm_90": 55, "cuda:sm_80+": 50},  # sm_90: between flash's generations; its spec has the figures
        dtypes={"float16", "bfloat16"},
        kv_cache_dtypes={"auto", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"},
        head_sizes={64, 128, 256},
        block_sizes=MultipleOf(1),
        preferred_block_size=16,
        kv_cache_layouts=("NHD", "HND"),
        features={
            "sliding_window", "logits_soft_cap", "kv_scales", "kv_scales_on_device", "kv_scales_per_head",
            "multi_token_decode", "tree_mask", "strided_kv_cache", "lse", "sinks",
        },
        unsupported={
            "alibi": "FlashInfer makes its own slopes, from the local number of heads",
            "alibi_standard": "FlashInfer makes its own slopes, which are wrong under tensor parallelism",
            "encoder": "it plans attention over the paged cache only",
            "encoder_decoder": "it plans causal attention only",
            "bidirectional_spans": NO_SPANS,
        },
        cuda_graph="uniform",
        host_needs={
            "query_start_loc", "seq_lens", "paged_kv_indptr", "paged_kv_last_page_len",
            "block_table", "paged_kv_indices", "slot_mapping",  # ids beyond the cache, prompts without slots: refused
            "context_lens",  # the option cascade
            "tree_mask",
        },
        device_needs={
            "slot_mapping", "paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_indices",
            "block_table", "seq_lens",  # the option decode=xqa
        },
        host_lengths="exact",
        plan_staging="shared",
        pad_seq_len=0,
        # A tile of keys may begin in a block before the window. The default kernels of decodes and prefills do not read
        # it, but for draft trees, whose window is wider in the kernel than in the mask; of the option decode, which no
        # variant tells apart, cuda_cores and xqa do: with NaN in such a block the output is NaN (an H200, 2026-11-23).
        finite_passed_blocks=True,
        requires=REQUIRES,
        workspace_bytes=(64 + 4 * 8) << 20,  # two plan keys, each with a wrapper of decodes and one of prefills
        options=OPTIONS,
        variants=(
            # Over fp8 caches XQA is the fastest kernel of decodes at every size that README.md has a figure of.
            Variant("xqa_built", check=checks.xqa_built, **_xqa_facts()),
            Variant("built", check=checks.built),
            Variant("xqa_jit", check=checks.xqa_compiled, compiles_at_run_time=True, **_xqa_facts()),
            Variant("jit", check=checks.compiled, compiles_at_run_time=True),
            Variant("latent_built", check=checks.latent_built, **_latent_facts()),
            Variant("latent_jit", check=checks.latent_compiled, compiles_at_run_time=True, **_latent_facts()),
        ),
    )  # fmt: skip


def _xqa_facts() -> dict[str, Any]:
    """What both variants whose decodes of one token run by XQA state otherwise."""
    return {
        "devices": {"cuda:sm_90": 55, "cuda:sm_120": 50},
        "kv_cache_dtypes": {"fp8_e4m3"},
        "block_sizes": set(modules.XQA_PAGES),
        "max_group_size": 32,
        "features": {
            "kv_scales", "kv_scales_on_device", "multi_token_decode", "tree_mask", "strided_kv_cache", "sinks",
        },
        "unsupported": {
            "sliding_window": f"XQA {checks.XQA_WINDOW_FP8}",
            "logits_soft_cap": "XQA has none",
            "lse": "XQA returns no log-sum-exp",
            "kv_scales_per_head": "XQA reads one scale for all heads",
            "alibi": "FlashInfer makes its own slopes, from the local number of heads",
            "alibi_standard": "FlashInfer makes its own slopes, which are wrong under tensor parallelism",
            "encoder": "it plans attention over the paged cache only",
            "encoder_decoder": "it plans causal attention only",
            "bidirectional_spans": NO_SPANS,
        },
        "finite_tail": True,  # XQA reads the rows of a last page that hold no token, and multiplies them by 0
    }  # fmt: skip


def _latent_facts() -> dict[str, Any]:
    """What both variants for latent caches (MLA) state otherwise."""
    return {
        "factory": "attn_flashinfer.latent:LatentBackend",
        "use_mla": True,
        "mla_only": True,
        "kv_cache_dtypes": {"auto", "float16", "bfloat16", "fp8_e4m3"},
        "head_sizes": {576},
        "head_size_v": {512},
        "max_group_size": 128,
        "kv_cache_layouts": ("NHD",),
        "preferred_block_size": 64,
        "features": {"kv_scales", "kv_scales_on_device", "kv_scales_per_head", "multi_token_decode", "lse"},
        "unsupported": {
            "sliding_window": "its kernels of latent attention take no window",
            "logits_soft_cap": "its kernels of latent attention take no cap",
            "alibi": "its kernels of latent attention take no slopes",
            "alibi_standard": "its kernels of latent attention take no slopes",
            "sinks": "its kernels of latent attention take none on the GPUs below sm_100",
            "strided_kv_cache": "a latent cache is whole",
            "encoder": "it plans attention over the paged cache only",
            "encoder_decoder": "it plans causal attention only",
            "tree_mask": "its kernels of latent attention take no mask",
            "bidirectional_spans": "its kernels of latent attention take no mask",
        },
        "host_needs": {
            "query_start_loc", "seq_lens", "paged_kv_indptr", "paged_kv_last_page_len",
            "block_table", "paged_kv_indices",  # ids beyond the cache are refused
        },
        "device_needs": {"slot_mapping", "paged_kv_indptr", "paged_kv_indices"},
        "finite_passed_blocks": False,
        "workspace_bytes": 64 << 20,
        "options": LATENT_OPTIONS,
    }  # fmt: skip


@hookimpl
def attncore_doctor(host: Host) -> Mapping[str, str]:
    """Which modules are built, where, and whether others can be compiled here."""
    return modules.report()
