"""Specs that resemble real backends, and what is installed beside them: tests need no plugin, no GPU."""

from attncore import BackendSpec, MultipleOf, Option, Variant
from attncore.reference import attncore_backend
from attncore.registry.plugins.load import Registry
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason

PACKAGES = {"torch": "2.11.0+cu130", "flash-attn": "2.8.3", "flashinfer-python": "0.7.2", "triton": "3.6.0"}

FLASH = BackendSpec(
    name="flash",
    api=1,
    factory="attn_flash.backend:FlashBackend",
    devices={"cuda:sm_80+": 60},
    dtypes={"float16", "bfloat16"},
    head_sizes=MultipleOf(8, 256),
    block_sizes=MultipleOf(16),
    features={"sliding_window", "logits_soft_cap", "alibi", "multi_token_decode"},
    unsupported={"kv_scales": "the cache is kept in the model's dtype"},
    cuda_graph="always",
    variants=(
        Variant(
            "fa4",
            requires=("flash-attn-4>=4.0.0b30",),
            devices={"cuda:sm_90": 65, "cuda:sm_100": 80},
            head_sizes={64, 96, 128},
            block_sizes=MultipleOf(1),
            preferred_block_size=128,
            features={"sliding_window", "logits_soft_cap", "sinks", "multi_token_decode"},
            unsupported={"alibi": "the kernel takes no slopes"},
            finite_tail=True,
            compiles_at_run_time=True,
        ),
        Variant(
            "fa2",
            requires=("flash-attn>=2.8,<3",),
            block_sizes=MultipleOf(256),
            unsupported={"sinks": "the kernel takes none", "kv_scales": "the cache is kept in the model's dtype"},
        ),
    ),
)
FLASHINFER = BackendSpec(
    name="flashinfer",
    api=1,
    factory="attn_flashinfer.backend:FlashInferBackend",
    devices={"cuda:sm_75+": 50, "cuda:sm_90": 70, "cuda:sm_100": 75},
    dtypes={"float16", "bfloat16"},
    kv_cache_dtypes={"auto", "fp8_e4m3", "fp8_e5m2"},
    head_sizes={64, 128, 256},
    block_sizes=MultipleOf(1),
    preferred_block_size=16,
    kv_cache_layouts=("NHD", "HND"),
    features={"sliding_window", "logits_soft_cap", "alibi_standard", "kv_scales", "multi_token_decode"},
    unsupported={"sinks": "the paged wrappers take none"},
    cuda_graph="uniform_decode",
    device_needs={"paged_kv_indices"},
    requires=("flashinfer-python>=0.7,<0.8",),
    workspace_bytes=256 << 20,
    compiles_at_run_time=True,
    host_lengths="exact",
    options={"tensor_cores": Option(bool, "decode with tensor cores", default=True)},
)
ROCM = BackendSpec(
    name="rocm",
    api=1,
    factory="attn_rocm.backend:RocmBackend",
    devices={"rocm:gfx942": 70, "rocm:gfx950": 70, "rocm:gfx90a": 60, "rocm:gfx11*": 30},
    dtypes={"float16", "bfloat16"},
    head_sizes={64, 128},
    block_sizes={16, 32},
    features={"sliding_window", "logits_soft_cap", "alibi"},
    unsupported={"sinks": "the kernel takes none"},
    cuda_graph="uniform_decode",
    requires=("triton>=3.2",),
    max_group_size=16,
    max_model_len=32768,
    max_block_id=65535,
    check=lambda request, host: (
        ["head size 64 on RDNA needs a window"]
        if host.arch.startswith("gfx11") and request.head_size == 64 and request.sliding_window is None
        else ()
    ),
)
ACME = Reason(
    "incompatible",
    "built for contract 2; this attncore speaks 1",
    asked=2,
    accepted=1,
    source="attncore 0.1.0",
    fix="install acme-attn<1",
)


def record(spec, distribution, version="0.1.0"):
    """A loaded plugin."""
    return PluginRecord(spec.name, distribution, version, "loaded", spec=spec)


RECORDS = (
    PluginRecord("acme", "acme-attn", "1.0", "incompatible", (ACME,)),
    record(FLASH, "attn-flash"),
    record(FLASHINFER, "attn-flashinfer"),
    record(attncore_backend(), "attncore"),
    record(ROCM, "attn-rocm"),
)
REGISTRY = Registry(RECORDS, dict(PACKAGES))
