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
    Attender,
    attending_by,
    configs_of,
    using_attncore,
    windows_of,
)
from attncore.integrations.transformers.refused_models import (
    refuse_forgetful_cache,
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
    reads_cache_of: str | None = None
    """The layer before it whose keys and values it attends over, within the same window; None: it makes its own."""

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
    decoder, positions of their own, embeddings made of neighbouring tokens or scaled by how many tokens are masks,
    frequencies by the longest request, queries scaled by their place in the row, causal layers that run twice, a
    sliding window that is only in the masks that the model makes or only in what a layer passes, or is another one
    there, encoder layers that do not say that they are, layers that say one direction in a model whose masks have the
    other, or a window that transformers' cache alone has.
    """
    refuse_layers(model)
    layers = tuple(_recorded(model).layers.values())
    if not layers:
        raise ValueError(f"model: no layer of {type(model).__name__} calls transformers' attention interface")
    is_decoder = any(layer.attn_type is AttentionType.DECODER for layer in layers)
    refuse_positions(model, is_decoder)
    if is_decoder and not any(layer.sliding_window for layer in layers):
        refuse_forgetful_cache(model)
    return layers


def _recorded(model: Any) -> _Recorder:
    """What the layers ask for under RECORDING, for what masks alone say.

    Where windows are configured to be none, a model may fail to make masks with one: then under NAME, without masks.
    """
    windows = [window for config in configs_of(model) for window in windows_of(config)]
    if any(windows) or not windows:
        return _recorded_as(RECORDING, model, _Recorder(model))
    recorder = _Recorder(model)
    try:
        return _recorded_as(RECORDING, model, recorder)
    except Exception:
        if recorder.has_refused:
            raise
    return _recorded_as(NAME, model, _Recorder(model))


def _recorded_as(name: str, model: Any, recorder: _Recorder) -> _Recorder:
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with attending_by(recorder), using_attncore(model, name), torch.no_grad():
        model(input_ids=token, use_cache=False)
    return recorder


class _Recorder(Attender):
    """An Attender that records what every layer asks for, and gives zeros."""

    def __init__(self, model: Any) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.layers: dict[str, ModelLayer] = {}
        self.has_refused = False
        self._made: dict[Any, tuple[str, Tensor, Tensor]] = {}
        """By where they lie: the layer that made keys and values, and these, so that none lie there later."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> Tensor:
        try:
            return self._noted(module, query, key, value, asked)
        except BaseException:
            self.has_refused = True
            raise

    def _noted(self, module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> Tensor:
        name, sizes = self._names[module], (query.shape[2], value.shape[2])
        scale, causal = asked.get("scaling"), asked.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", None)
        if causal is None:
            causal = True  # as transformers takes it
            if asked.get("made_encoder_masks"):
                refuse_unsaid_direction(name, module)
        if asked.get("made_encoder_masks_alone" if causal else "made_causal_masks_alone"):
            refuse_other_direction(name, module, causal)
        refused = [kind for kind in _REFUSED_INPUTS if asked.get(kind) is not None]
        if refused:
            raise ValueError(f"layer {name}: it passes {refused[0]} to its attention, which no backend takes")
        if causal and name in self.layers:
            raise ValueError(
                f"layer {name}: it runs twice in a forward pass; its second keys would replace the first in its cache"
            )
        if (window := asked.get("sliding_window")) is not None and window < 1:
            raise ValueError(f"layer {name}: sliding_window {window} lets a token see none, not even itself")
        self._compare_windows(name, module, window, asked)
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
            self._reads_cache_of(name, key, value, window) if causal else None,
        )
        return query.new_zeros((*query.shape[:2], sizes[1]))

    def _reads_cache_of(self, name: str, key: Tensor, value: Tensor, window: int | None) -> str | None:
        given = tuple((one.untyped_storage()._cdata, one.storage_offset(), one.shape) for one in (key, value))
        maker, *_ = self._made.setdefault((window, *given), (name, key, value))
        return None if maker == name else maker

    @staticmethod
    def _compare_windows(name: str, module: Any, window: int | None, asked: Mapping[str, Any]) -> None:
        """ValueError where a layer's window is not that of the mask which its model makes for it."""
        of_masks, longest = asked.get("mask_windows"), asked.get("longest")
        if of_masks is None:  # the model has made no mask
            return
        of_mask = of_masks if asked["has_window_mask"] else frozenset()
        if window is None:
            if of_mask:
                refuse_lost_window(name, module)
        elif window not in of_mask and (of_mask or longest is None or window < longest):
            refuse_other_window(name, module, window, min(of_mask, default=None))
