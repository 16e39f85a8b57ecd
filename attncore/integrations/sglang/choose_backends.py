"""Backends for the layers of a model: one for each group of layers that one configuration serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attncore.integrations.sglang.engine_facts import Layer, captures_decodes
from attncore.registry.choice.layers_choice import LayersChoice
from attncore.registry.choice.select import select_for_layers
from attncore.registry.request import AttentionRequest
from attncore.vocabulary import dtype_name


def kinds_of(layers: Iterable[Layer]) -> dict[tuple[Any, ...], str]:
    """The name of each kind of layers: that of its first layer."""
    found: dict[tuple[Any, ...], str] = {}
    for layer in layers:
        found.setdefault(layer.kind, layer.name)
    return found


def choose(runner: Any, layers: Iterable[Layer], name: str | None) -> LayersChoice:
    """A backend for each kind of layers, ``name`` where it is not None. Errors as of ``attncore.select_for_layers``."""
    first = {layer.name: layer for layer in layers}
    shared = _of_engine(runner)
    requests = {kind: _request(first[kind], shared, name) for kind in kinds_of(first.values()).values()}
    return select_for_layers(requests)


def _of_engine(runner: Any) -> dict[str, Any]:
    """The fields of a request that the engine decides for all layers."""
    dtype, cache = (dtype_name(one) for one in (runner.dtype, runner.token_to_kv_pool.dtype))
    return {
        "dtype": dtype,
        "kv_cache_dtype": "auto" if cache == dtype else cache,
        "block_size": runner.page_size,
        "num_blocks": int(runner.token_to_kv_pool.size) // runner.page_size + 1,
        "kv_cache_layout": "NHD",
        "strided_kv_cache": True,
        "max_model_len": runner.model_config.context_len,
        "cuda_graph": "uniform_decode" if captures_decodes(runner) else "never",
    }


def _request(layer: Layer, shared: Mapping[str, Any], name: str | None) -> AttentionRequest:
    scaled = (layer.k_scale, layer.v_scale) != (1.0, 1.0)
    return AttentionRequest(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v if layer.head_size_v != layer.head_size else None,
        sliding_window=layer.sliding_window,
        logits_soft_cap=layer.logits_soft_cap,
        sinks=layer.sinks is not None,
        features={"kv_scales"} if scaled else (),
        backend=name,
        **shared,
    )
