"""Choosing one backend for all attention layers of a model."""

from __future__ import annotations

from typing import Any

from attncore.errors import NoBackendError
from attncore.integrations.transformers.model_layers import ModelLayer, attention_layers
from attncore.quoted import quoted
from attncore.registry.choice.choice import Choice
from attncore.registry.choice.select import select
from attncore.registry.host.host import Host
from attncore.registry.request import AttentionRequest


def select_for_model(
    model: Any, *, layers: tuple[ModelLayer, ...] | None = None, host: Host | None = None, **fields: Any
) -> Choice:
    """The backend for all attention layers of a model.

    ``fields`` are further fields of an AttentionRequest, such as ``block_size``; the dtype is the model's. Raises
    NoBackendError that names the first layer that no backend can run, with every backend's reasons, and ValueError
    where layers need caches of different shapes.
    """
    layers = attention_layers(model) if layers is None else layers
    fields = {"dtype": str(model.dtype).removeprefix("torch."), **fields}
    first = layers[0]
    for layer in layers:
        for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v", "use_mla"):
            one, other = getattr(first, name), getattr(layer, name)
            if one != other:
                raise ValueError(
                    f"{name}: {other} in layer {layer.name}, {one} in {first.name}; layers of one backend share a shape"
                )
    asked = [layer.asked() for layer in layers]
    if said := [name for name in asked[0] if name in fields and name != "features"]:
        raise TypeError(f"{said[0]}: {quoted(fields[said[0]])} given, but the model's layers say it; leave it out")
    given = frozenset(fields.pop("features", ()))
    together = {
        **asked[0],
        "sliding_window": next((one["sliding_window"] for one in asked if one["sliding_window"]), None),
        "logits_soft_cap": next((one["logits_soft_cap"] for one in asked if one["logits_soft_cap"]), None),
        "sinks": any(one["sinks"] for one in asked),
        "features": given.union(*(one["features"] for one in asked)),
    }
    try:
        return select(AttentionRequest(**together, **fields), host=host)
    except NoBackendError as error:
        for layer, one in zip(layers, asked, strict=True):
            try:
                select(AttentionRequest(**{**one, "features": given.union(one["features"])}, **fields), host=host)
            except NoBackendError as alone:
                raise NoBackendError(f"layer {layer.name}: {alone}") from None
        raise NoBackendError(f"{type(model).__name__}: no backend runs all of its layers: {error}") from None
