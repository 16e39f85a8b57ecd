"""The built-in backend ``reference``, registered through the same hook as everybody's."""

from __future__ import annotations

from attncore.registry.hookspecs import hookimpl
from attncore.registry.sizes import MultipleOf
from attncore.registry.spec import BackendSpec


@hookimpl
def attncore_backend() -> BackendSpec:
    """Attention in torch, on any device, in float32 arithmetic: what others are compared with."""
    return BackendSpec(
        name="reference",
        api=1,
        factory="attncore.reference:ReferenceBackend",
        devices={"any": 0},
        dtypes={"float16", "bfloat16", "float32"},
        kv_cache_dtypes={"auto", "float16", "bfloat16", "float32"},
        head_sizes=MultipleOf(1),
        block_sizes=MultipleOf(1),
        preferred_block_size=16,
        kv_cache_layouts=("NHD",),
        features={
            "sliding_window",
            "logits_soft_cap",
            "alibi",
            "alibi_standard",
            "sinks",
            "encoder",
            "encoder_decoder",
            "multi_token_decode",
            "lse",
        },
        unsupported={
            "kv_scales": "the cache is kept in a floating-point dtype without scales",
            "tree_mask": "it takes no mask",
        },
        head_size_v=MultipleOf(1),
        use_mla=True,
        cuda_graph="never",
        needs={"block_table"},
        host_lengths="exact",
        requires=("torch>=2.6",),
    )
