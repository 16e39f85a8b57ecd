"""Hugging Face transformers over attncore: any of its models, on paged caches, by whatever backend was chosen.

Importing this module registers the attention implementation ``attncore`` with transformers' public
``AttentionInterface``. What each layer asks for, its window, soft cap, scale and sinks, is taken from the model itself:
from what it passes to its attention in a run of one token.

No mask function is registered, on purpose: transformers makes no mask then, and a step's metadata says who attends to
whom. With one, its search for packed sequences would wait for the device in every forward pass.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from attncore.abstract import AttentionType
from attncore.errors import NoBackendError
from attncore.ops.operator import ForwardContext
from attncore.registry.choice.select import select
from attncore.registry.request import AttentionRequest

if TYPE_CHECKING:
    from attncore.abstract import AttentionBackend, AttentionImpl
    from attncore.registry.choice.choice import Choice
    from attncore.registry.host.host import Host

NAME = "attncore"
"""The attention implementation's name: ``model.set_attn_implementation("attncore")``."""

_LAYER_TYPES = frozenset(("full_attention", "sliding_attention", "moe", "sparse", "dense"))
"""Of a configuration: layers that keep nothing but keys and values, and see all of them or a window; and MLPs."""
_BEYOND = ("position_bias", "indices", "block_indices")
"""What some models pass to their attention beside scale, window, cap and sinks, and no backend takes."""


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
    """None: as ``head_size``."""
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: Tensor | None
    """(num_heads,): the layer's own parameter."""
    attn_type: AttentionType

    def asked(self) -> dict[str, Any]:
        """The fields of an AttentionRequest that this layer needs."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": self.sinks is not None,
            "features": {"encoder"} if self.attn_type is AttentionType.ENCODER_ONLY else set(),
        }


class _Here(threading.local):
    context: _ModelContext | _Recorder | None = None


_here = _Here()


def attention_layers(model: Any) -> tuple[ModelLayer, ...]:
    """The attention layers of a model of transformers, in the order in which it runs them.

    Runs the model over one token, without a cache, and records what every layer passes to its attention. ValueError
    where none does, since the model then has attention code of its own, and for models that would say something else
    when their requests run as one row over paged caches: recurrent layers, chunked attention, an encoder beside a
    decoder, positions of their own, frequencies by the longest request, causal layers that run twice.
    """
    _refuse(model)
    recorder = _Recorder({module: name for name, module in model.named_modules()})
    before, _here.context = _here.context, recorder
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    try:
        with _implementation(model), torch.no_grad():
            model(input_ids=token, use_cache=False)
    finally:
        _here.context = before
    if not recorder.layers:
        raise ValueError(f"model: no layer of {type(model).__name__} calls transformers' attention interface")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"model: {type(model).__name__} takes no position_ids and counts tokens by itself, so that requests "
            "cannot run as one row"
        )
    layers = tuple(recorder.layers.values())
    shifted = _first_position(model)
    if shifted and any(layer.attn_type is AttentionType.DECODER for layer in layers):
        raise ValueError(
            f"model: {type(model).__name__} counts positions from {shifted}, after its padding token, and metadata "
            "from 0; of such models, encoders alone run, with position_ids = metadata.positions + padding_idx + 1"
        )
    return layers


def _first_position(model: Any) -> int:
    """What a model counts positions from: 0, or as RoBERTa does, which has a row for padding before them."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def _refuse(model: Any) -> None:
    """ValueError for a model some of whose layers no paged cache and no metadata of a step serve."""
    name, whole = type(model).__name__, model.config
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    if getattr(whole, "is_encoder_decoder", False):
        raise ValueError(f"model: {name} has an encoder beside its decoder; run models of one of them")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if others or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"model: {name} has layers of type {', '.join(others) or 'recurrent'}; attncore runs full and sliding "
            "attention, and keeps no other state of a request"
        )
    _refuse_moving_frequencies(model, config)


def _refuse_moving_frequencies(model: Any, config: Any) -> None:
    """ValueError for rotary embeddings that choose frequencies by the largest position of the row: of all requests."""
    longest = getattr(config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                said = module.config.rope_parameters
                limit = (said if layer_type is None else said[layer_type])["original_max_position_embeddings"]
                if longest and longest <= limit:
                    continue  # they never move
                do = (
                    f"for requests of up to {limit} tokens set config.max_position_embeddings of the loaded model to "
                    f"{limit}; for longer ones take a model of rope type default, linear, yarn or llama3"
                )
            elif isinstance(kind, str) and "dynamic" in kind:
                field = "rope_type" if layer_type is None else f"rope_type[{layer_type!r}]"
                do = (
                    f"they stand still up to max_position_embeddings, {longest}: for requests of so many tokens set "
                    f"model.{name}.{field} = 'default' after loading; for longer ones take linear, yarn or llama3"
                )
            else:
                continue
            of_layers = f" of its {layer_type} layers" if layer_type else ""
            raise ValueError(
                f"model: the rope type{of_layers} is {kind}, whose frequencies follow the longest request of a step, "
                f"so that a request would change those beside it; {do}"
            )


def select_for_model(
    model: Any, *, layers: tuple[ModelLayer, ...] | None = None, host: Host | None = None, **fields: Any
) -> Choice:
    """The backend for all attention layers of a model; ``fields`` are more of an AttentionRequest (``block_size``...).

    The dtype is the model's. Raises NoBackendError that names the first layer that no backend can run, with every
    backend's reasons, and ValueError where layers need caches of different shapes.
    """
    layers = attention_layers(model) if layers is None else layers
    fields = {"dtype": str(model.dtype).removeprefix("torch."), **fields}
    first = layers[0]
    for layer in layers:
        for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v"):
            one, other = getattr(first, name), getattr(layer, name)
            if one != other:
                raise ValueError(
                    f"{name}: {other} in layer {layer.name}, {one} in {first.name}; layers of one backend share a shape"
                )
    asked = [layer.asked() for layer in layers]
    together = {
        **asked[0],
        "sliding_window": next((one["sliding_window"] for one in asked if one["sliding_window"]), None),
        "logits_soft_cap": next((one["logits_soft_cap"] for one in asked if one["logits_soft_cap"]), None),
        "sinks": any(one["sinks"] for one in asked),
        "features": set().union(*(one["features"] for one in asked), fields.pop("features", ())),
    }
    try:
        return select(AttentionRequest(**together, **fields), host=host)
    except NoBackendError as error:
        for layer, one in zip(layers, asked, strict=True):
            try:
                select(AttentionRequest(**one, **fields), host=host)
            except NoBackendError as alone:
                raise NoBackendError(f"layer {layer.name}: {alone}") from None
        raise NoBackendError(f"{type(model).__name__}: no backend runs all of its layers: {error}") from None


class PagedCaches(Mapping[str, Any]):
    """A model's paged caches by layer name, one a layer, and the layers' implementations. Made by ``paged_caches``."""

    def __init__(self, impls: Mapping[str, AttentionImpl], caches: Mapping[str, Any], names: Mapping[Any, str]) -> None:
        self.impls, self._caches, self._names = impls, caches, names

    def __getitem__(self, name: str) -> Any:
        return self._caches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._caches)

    def __len__(self) -> int:
        return len(self._caches)


def paged_caches(
    model: Any, backend: AttentionBackend, num_blocks: int, *, layers: tuple[ModelLayer, ...] | None = None
) -> PagedCaches:
    """A cache of ``num_blocks`` blocks for every attention layer, on the backend's device, and the layers themselves.

    A layer that is not causal has no cache. ValueError where the backend refuses what a layer asks for.
    """
    layers = attention_layers(model) if layers is None else layers
    impls, caches = {}, {}
    for layer in layers:
        try:
            impls[layer.name] = backend.impl(
                layer.name,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                logits_soft_cap=layer.logits_soft_cap,
                sinks=layer.sinks,
                attn_type=layer.attn_type,
            )
        except ValueError as error:
            raise ValueError(f"layer {layer.name}: {error}") from None
        causal = layer.attn_type is AttentionType.DECODER
        caches[layer.name] = backend.allocate_kv_cache(num_blocks) if causal else None
    return PagedCaches(impls, caches, {layer.module: layer.name for layer in layers})


@contextmanager
def attncore_context(metadata: Any, kv_caches: PagedCaches) -> Iterator[None]:
    """Around a forward pass: its layers attend by ``metadata`` over ``kv_caches``.

    The model runs all tokens of the step as one row: ``model(input_ids=(1, T), position_ids=(1, T), use_cache=False)``,
    T = ``metadata.num_tokens`` or more. ``metadata`` may be a mapping of layer names to metadata, where layers belong
    to several KV-cache groups.
    """
    before, _here.context = _here.context, _ModelContext(metadata, kv_caches)
    try:
        yield
    finally:
        _here.context = before


class _ModelContext:
    __slots__ = ("_caches", "_layers")

    def __init__(self, metadata: Any, caches: PagedCaches) -> None:
        self._layers, self._caches = ForwardContext(metadata, caches.impls), caches

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> Tensor:
        name = self._caches._names.get(module)
        if name is None:
            raise RuntimeError(
                f"{type(module).__name__}: this layer has no cache in the context; make kv_caches of the same model"
            )
        impl, metadata = self._layers.layer(name)
        return impl.forward(query, key, value, self._caches._caches[name], metadata)


class _Recorder:
    """Keeps what every layer asks for; its attention is zeros."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        self._names = names
        self.layers: dict[str, ModelLayer] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> Tensor:
        name, sizes = self._names[module], (query.shape[2], value.shape[2])
        scale, causal = asked.get("scaling"), asked.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        beyond = [kind for kind in _BEYOND if asked.get(kind) is not None]
        if beyond:
            raise ValueError(f"layer {name}: it passes {beyond[0]} to its attention, which no backend takes")
        if causal and name in self.layers:
            raise ValueError(
                f"layer {name}: it runs twice in a forward pass; its second keys would replace the first in its cache"
            )
        self.layers[name] = ModelLayer(
            name,
            module,
            query.shape[1],
            key.shape[1],
            sizes[0],
            sizes[1] if sizes[1] != sizes[0] else None,
            float(sizes[0] ** -0.5 if scale is None else scale),
            asked.get("sliding_window") or None,
            asked.get("softcap") or None,
            asked.get("s_aux"),
            AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
        )
        return query.new_zeros((*query.shape[:2], sizes[1]))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    """What a model calls: query (1, num_heads, T, head_size), key and value likewise; gives (1, T, num_heads, size)."""
    context = _here.context
    if context is None:
        raise RuntimeError(
            f"{type(module).__name__}: the attention implementation {NAME!r} ran outside its context; run the model "
            "inside `with attncore_context(metadata, kv_caches):`"
        )
    if query.shape[0] != 1:
        raise ValueError(
            f"input_ids: {query.shape[0]} rows found; give the tokens of all requests as one row (1, num_tokens)"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask: a mask was given; the metadata says who attends to whom, so give none")
    if asked.get("dropout"):
        raise ValueError("dropout: the model is training; call model.eval()")
    output = context.attend(module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), asked)
    return output.unsqueeze(0), None


@contextmanager
def _implementation(model: Any) -> Iterator[None]:
    """The model's attention is attncore's meanwhile."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(NAME, _attention)
