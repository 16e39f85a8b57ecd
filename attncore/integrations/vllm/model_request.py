"""What vLLM's configuration asks of an attncore backend: an AttentionRequest, and what was negotiated for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attncore.integrations.vllm.limits import num_blocks_of
from attncore.integrations.vllm.refusals import KV_CACHE_DTYPES
from attncore.integrations.vllm.settings import settings_of
from attncore.registry.choice.negotiate import Negotiation
from attncore.registry.choice.negotiate_installed import negotiate_installed
from attncore.registry.request import AttentionRequest


def current_config() -> Any:
    """The configuration that vLLM is set up with at the moment; None outside of that."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def request_for_model(
    backend: str | None,
    vllm_config: Any,
    *,
    head_size: int,
    dtype: Any,
    kv_cache_dtype: Any,
    block_size: int | None,
    has_sink: bool,
    has_sliding_window: bool,
) -> AttentionRequest:
    """The request of a kind of layers that vLLM's selector describes. It knows of neither soft caps nor slopes.

    Without a configuration, as in a test of the selector, the numbers that it would have are those of one head.
    """
    model = getattr(vllm_config, "model_config", None)
    heads, kv_heads, window, max_model_len = 1, 1, None, None
    if model is not None:
        parallel = vllm_config.parallel_config
        heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
        window, max_model_len = model.get_sliding_window(), model.max_model_len
    if heads % kv_heads:  # a draft model's, say, whose layers the builder sees
        heads = kv_heads = 1
    return AttentionRequest(
        backend=backend,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=KV_CACHE_DTYPES[kv_cache_dtype or "auto"],
        manager_block_size=block_size,
        sliding_window=(window or 1) if has_sliding_window else None,
        sinks=has_sink,
        strided_kv_cache=True,
        max_model_len=max_model_len,
        **settings_of(vllm_config),
    )


def request_for_layers(
    backend: str | None, vllm_config: Any, block_size: int, layers: Iterable[Any], *, of_kernel: bool = True
) -> AttentionRequest:
    """The request of the layers of one builder, which share a cache's shape; they are instances of AttncoreImpl.

    ``block_size`` is that of the kernel, or else (``of_kernel=False``) of vLLM's allocator, which the kernel's divides.
    """
    layers = list(layers)
    first = layers[0]
    if of_kernel:  # vLLM's question of captured sizes is of all layers of a head size, whatever their builders
        _check_heads(layers)
    fp8 = [layer for layer in layers if layer.scales != (1.0, 1.0)]
    return AttentionRequest(
        backend=backend,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        dtype=vllm_config.model_config.dtype,
        kv_cache_dtype=KV_CACHE_DTYPES[first.kv_cache_dtype],
        block_size=block_size if of_kernel else None,
        manager_block_size=block_size,
        sliding_window=max((layer.sliding_window or 0 for layer in layers), default=0) or None,
        logits_soft_cap=next((layer.logits_soft_cap for layer in layers if layer.logits_soft_cap), None),
        alibi=any(layer.alibi_slopes is not None for layer in layers),
        sinks=any(layer.sinks is not None for layer in layers),
        strided_kv_cache=True,
        features={"kv_scales"} if fp8 else (),
        max_model_len=vllm_config.model_config.max_model_len,
        num_blocks=num_blocks_of(vllm_config.cache_config, block_size),
        **settings_of(vllm_config),
    )


def _check_heads(layers: list[Any]) -> None:
    """ValueError where layers of one builder differ in their heads: vLLM puts those of equal caches together, and the
    queries say nothing of a cache. A backend plans for one number of them.
    """
    found = {(one.num_heads, one.num_kv_heads, one.head_size) for one in layers}
    if len(found) > 1:
        kinds = " and ".join(f"{heads} over {kv_heads} of {size}" for heads, kv_heads, size in sorted(found))
        raise ValueError(
            f"attncore: layers of one cache group have different heads, {kinds}, such as a model and one that drafts "
            "for it; a backend plans for one kind: choose another --attention-backend for one of them"
        )


def negotiated(request: AttentionRequest) -> Negotiation:
    """What attncore negotiates for a request on this machine."""
    return negotiate_installed(request)


def sentences(negotiation: Negotiation) -> list[str]:
    """Why no backend, or not the one that is named, can be used; none where one can.

    A mistaken option is such a reason also where another backend could be used: it is the user's to correct.
    """
    if mistaken := [
        f"attncore: {candidate.name}: {reason}"
        for candidate in negotiation.rejected
        for reason in candidate.reasons
        # a variant alone may lack what another has
        if reason.code == "option" and reason.source == f"{candidate.distribution} {candidate.version}".strip()
    ]:
        return mistaken
    if negotiation.usable and (not negotiation.request.backend or negotiation.chosen is not None):
        return []
    named = negotiation.request.backend
    return [
        f"attncore: {candidate.name}: {reason}"
        for candidate in negotiation.rejected
        if named in (None, candidate.name)
        for reason in candidate.reasons
    ] or [f"attncore: {negotiation.refusal}"]
