"""What vLLM may ask of a backend and this bridge does not run, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

REFUSED = {
    "use_mla": "the model has latent attention (MLA), whose interface in vLLM is another one, which this bridge lacks",
    "use_sparse": "the model has sparse attention, for which attncore's backends have no index of keys",
    "use_mm_prefix": "parts of a prompt see each other in both directions (multimodal prefix), which no step of "
    "attncore says",
    "use_per_head_quant_scales": "the checkpoint has a cache scale for each head, of which vLLM hands over one alone",
    "use_non_causal": "the attention is not causal, and adopted steps are of causal layers",
    "use_batch_invariant": "results that do not depend on the batch (VLLM_BATCH_INVARIANT) are promised by no spec of "
    "attncore",
    "use_pcp": "prefill context parallelism cuts a request's keys apart, and the bridge merges no parts",
    "use_dcp": "decode context parallelism cuts a request's keys apart, and the bridge merges no parts",
    "use_adaptive_verification": "adaptive verification decides on the device how many drafts run, and backends plan "
    "by the host's numbers",
    "use_rswa": "the window leaves a prefix of each request visible (R-SWA), which no window of attncore does",
}
"""Argument of vLLM's ``validate_configuration`` -> why the bridge refuses it."""

PASSED = frozenset({"has_sink", "has_sliding_window", "use_kv_connector"})
"""Further arguments that the bridge serves, or leaves to attncore's reasons."""

KV_CACHE_DTYPES = {
    "auto": "auto", "float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float": "float32",
    "float32": "float32", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2",
}  # fmt: skip
"""vLLM's name of a cache's dtype -> attncore's."""


def refused_flags(asked: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each flag of vLLM's selector that is set and that the bridge does not serve."""
    for name, value in asked.items():
        if value and name in REFUSED:
            yield REFUSED[name]
        elif value and name not in PASSED:  # of a later vLLM: what is not known is not promised
            yield f"vLLM asks for {name}, which this bridge does not know"


def refused_attn_type(attn_type: Any) -> str | None:
    """Why a type of attention is refused; None for decoder layers."""
    name = str(getattr(attn_type, "value", attn_type))
    if name == "decoder":
        return None
    return f"a layer has attention of the type {name}; the bridge runs decoder layers over a paged cache only"


def refused_cache_dtype(kv_cache_dtype: Any) -> str | None:
    """Why a dtype of the cache is refused; None for those that attncore knows."""
    if kv_cache_dtype is None or kv_cache_dtype in KV_CACHE_DTYPES:
        return None
    return (
        f"kv_cache_dtype {kv_cache_dtype}: attncore's backends read caches of {', '.join(KV_CACHE_DTYPES)}; other "
        "quantised ones have scales beside the keys that no spec declares"
    )


def refused_engine(vllm_config: Any) -> Iterator[str]:
    """A sentence for each part of vLLM's configuration that the bridge does not run."""
    parallel = vllm_config.parallel_config
    for name, flag in (("decode", "use_dcp"), ("prefill", "use_pcp")):
        if getattr(parallel, f"{name}_context_parallel_size", 1) > 1:
            yield REFUSED[flag]
    if getattr(parallel, "use_ubatching", False):
        yield "dual batch overlap makes two steps at once of one group's layers, and a backend has one plan"
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        yield (
            "kv_sharing_fast_prefill makes a step of its own, of vLLM's fields, for layers that share a cache; leave "
            "it out: they run over the whole step then"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield (
            "calculate_kv_scales sets the cache's scales in a forward pass; give a checkpoint that has them, or leave "
            "them at 1"
        )
