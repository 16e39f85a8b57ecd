"""The attention layers of a model, and what each asks for, recorded while the model runs one token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncore.abstract import AttentionType
from attncore.integrations.transformers.attention_interface import (
    LATENT,
    NAME,
    RECORDING,
    attending_by,
    configs_of,
    using_attncore,
)
from attncore.integrations.transformers.refused_models import (
    refuse_layers,
    refuse_lost_window,
    refuse_other_direction,
    refuse_other_window,
    refuse_positions,
    refuse_unsaid_direction,
)

_REFUSED_INPUTS = ("position_bias", "indices", "block_indices")
"""What some models pass to their attention and no backend takes."""


@dataclass(frozen=True)
class ModelLayer:
    """One attention layer of a model, and what it asks for."""

    name: str
    """The module's dotted name in the model."""
    module: Any
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None
    """None: the same as ``head_size``."""
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: Tensor | None
    """(num_heads,): the layer's own parameter."""
    attn_type: AttentionType
    use_mla: bool = False
    """Whether its keys are latent rows, whose first columns are the values (``use_latent_caches``)."""

    def asked(self) -> dict[str, Any]:
        """The fields of an AttentionRequest that this layer needs."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "use_mla": self.use_mla,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": self.sinks is not None,
            "features": {"encoder"} if self.attn_type is AttentionType.ENCODER_ONLY else set(),
        }


def attention_layers(model: Any) -> tuple[ModelLayer, ...]:
    """The attention layers of a model of transformers, in the order in which it runs them.

    Runs the model over one token, without a cache, and records what every layer passes to its attention. ValueError
    where none does, since the model then has attention code of its own, and for models whose output would change when
    their requests run as one row over paged caches: with recurrent layers, chunked attention, an encoder beside a
    decoder, positions of their own, embeddings made of neighbouring tokens, frequencies by the longest request, causal
    layers that run twice, a sliding window that is only in the masks that the model makes and that no layer passes on,
    or is another one there, or encoder layers that do not say that they are, or whose model makes causal masks.
    """
    refuse_layers(model)
    recorder = _Recorder({module: name for name, module in model.named_modules()})
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with attending_by(recorder), using_attncore(model, _implementation(model)), torch.no_grad():
        model(input_ids=token, use_cache=False)
    if not recorder.layers:
        raise ValueError(f"model: no layer of {type(model).__name__} calls transformers' attention interface")
    layers = tuple(recorder.layers.values())
    refuse_positions(model, any(layer.attn_type is AttentionType.DECODER for layer in layers))
    return layers


def _implementation(model: Any) -> str:
    """RECORDING, for what masks alone say; NAME where windows are configured to be none: making masks would fail."""
    windows = [config.sliding_window for config in configs_of(model) if hasattr(config, "sliding_window")]
    return RECORDING if any(windows) or not windows else NAME


class _Recorder:
    """An Attender that records what every layer asks for, and gives zeros."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        self._names = names
        self.layers: dict[str, ModelLayer] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> Tensor:
        name, sizes = self._names[module], (query.shape[2], value.shape[2])
        scale, causal = asked.get("scaling"), asked.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", None)
        if causal is None:
            causal = True  # as transformers takes it
            if asked.get("made_encoder_masks"):
                refuse_unsaid_direction(name, module)
        if not causal and asked.get("made_causal_masks_alone"):
            refuse_other_direction(name, module)
        refused = [kind for kind in _REFUSED_INPUTS if asked.get(kind) is not None]
        if refused:
            raise ValueError(f"layer {name}: it passes {refused[0]} to its attention, which no backend takes")
        if causal and name in self.layers:
            raise ValueError(
                f"layer {name}: it runs twice in a forward pass; its second keys would replace the first in its cache"
            )
        if (window := asked.get("sliding_window")) is not None and window < 1:
            raise ValueError(f"layer {name}: sliding_window {window} lets a token see none, not even itself")
        if window is None and asked.get("has_window_mask"):
            refuse_lost_window(name, module)
        if window is not None and (windows := asked.get("encoder_windows")) and window not in windows:
            refuse_other_window(name, module, window, windows[0])
        self.layers[name] = ModelLayer(
            name,
            module,
            query.shape[1],
            key.shape[1],
            sizes[0],
            sizes[1] if sizes[1] != sizes[0] else None,
            float(sizes[0] ** -0.5 if scale is None else scale),
            window,
            asked.get("softcap") or None,
            asked.get("s_aux"),
            AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
            getattr(module, LATENT, None) is not None,
        )
        return query.new_zeros((*query.shape[:2], sizes[1]))
