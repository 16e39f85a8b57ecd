"""The built-in backend ``reference``: its hook and its spec, as any plugin has them. Light: torch is imported by
``attncore.reference.backend``, when a backend is created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncore.registry.plugins.hookspecs import hookimpl
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.sizes import MultipleOf

if TYPE_CHECKING:
    from attncore.reference.backend import ReferenceBackend as ReferenceBackend
    from attncore.reference.backend import ReferenceImpl as ReferenceImpl


@hookimpl
def attncore_backend() -> BackendSpec:
    """Attention in torch, on any device, in float32 arithmetic: what others are compared with."""
    return BackendSpec(
        name="reference",
        api=1,
        factory="attncore.reference.backend:ReferenceBackend",
        devices={"any": 0},
        dtypes={"float16", "bfloat16", "float32"},
        kv_cache_dtypes={"auto", "float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2"},
        head_sizes=MultipleOf(1),
        block_sizes=MultipleOf(1),
        preferred_block_size=16,
        kv_cache_layouts=("NHD", "HND"),
        features={
            "sliding_window",
            "logits_soft_cap",
            "alibi",
            "alibi_standard",
            "sinks",
            "encoder",
            "encoder_decoder",
            "multi_token_decode",
            "tree_mask",
            "bidirectional_spans",
            "kv_scales",
            "kv_scales_on_device",
            "kv_scales_per_head",
            "strided_kv_cache",
            "lse",
        },
        head_size_v=MultipleOf(1),
        use_mla=True,
        cuda_graph="never",
        host_needs={
            "query_start_loc", "seq_lens", "context_lens", "slot_mapping", "cross_slot_mapping", "encoder_seq_lens",
            "encoder_query_lens", "encoder_query_start_loc", "tree_mask",
            "span_ends",
        },
        device_needs={"slot_mapping", "block_table", "cross_slot_mapping", "cross_block_table"},
        host_lengths="exact",
        requires=("torch>=2.7",),
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in ("ReferenceBackend", "ReferenceImpl"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attncore.reference import backend

    return getattr(backend, name)
