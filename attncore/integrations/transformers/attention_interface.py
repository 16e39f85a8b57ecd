"""The attention function that transformers' models call, and what it does meanwhile: record layers, or attend.

Importing this module registers it with transformers' ``AttentionInterface`` under NAME. No mask function is registered
there: transformers then makes no mask, and a step's metadata says who attends to whom. With one, its search for packed
sequences would synchronise with the device in every forward pass. Layers are recorded under another name, RECORDING,
which has a mask function, so that a window that is only in a layer's mask is seen, and that a model is an encoder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import attncore.ops.operator  # noqa: F401  (registers the operator)
from attncore.show import counted

NAME = "attncore"
"""The attention implementation's name: ``model.set_attn_implementation("attncore")``."""

RECORDING = "attncore_recording"
"""The implementation under which layers are recorded: with masks where, and only where, a window is in them."""

CACHE = "_attncore_cache"
"""The attribute of a module that is being compiled, or runs compiled: the tensors of its cache, and its layer's name.

The name is empty where the cache says which layer it is, so that layers of one kind share a graph."""


LATENT = "_attncore_latent"
"""The attribute of a module whose keys are latent rows: what its query and output pass through
(``latent_layers.LatentLayer``)."""


class Attender(Protocol):
    """What attends for the layers of a model during a forward pass."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> Tensor:
        """The attention of one layer.

        ``query``, ``key`` and ``value`` are (tokens, heads, size), the result (tokens, heads, size of a value head).
        ``asked`` holds what else the layer passes: scaling, sliding_window, softcap, s_aux, is_causal and so on; under
        RECORDING also ``has_window_mask``, whether the model gives the layer a mask with a window,
        ``made_encoder_masks``, whether it has made masks for an encoder, ``mask_windows``, the windows of its masks
        as a layer would pass them, None where it has made no mask, ``longest``, from which length on a window is none,
        and ``made_causal_masks_alone`` and ``made_encoder_masks_alone``, whether it has made masks, in none of which a
        token sees a later one, or all of which are for an encoder.
        """

    def attend_latent(
        self, module: Any, latent: Any, query: Tensor, key: Tensor, value: Tensor, asked: Mapping[str, Any]
    ) -> Tensor:
        """``attend`` of a layer of latent attention, ``latent`` its LatentLayer: ``query`` is over keys, ``key`` are
        latent rows, and the result is of values. By default absorbed.
        """
        return latent.expanded(self.attend(module, latent.absorbed_rows(query), key, value, asked))  # type: ignore[no-any-return]


class _Current(threading.local):
    """The attender of this thread's forward pass, and of which kind masks were made in it."""

    attender: Attender | None = None
    masks: _Masks


class _Masks:
    """The masks that a model has made in a forward pass."""

    def __init__(self) -> None:
        self.windows: set[int] = set()
        self.of_encoder: set[bool] = set()
        self.directions: set[bool] = set()
        """Whether tokens see later ones."""
        self.longest: int | None = None


_current = _Current()


@contextmanager
def attending_by(attender: Attender) -> Iterator[None]:
    """Inside, the models that this thread runs attend by ``attender``."""
    before, _current.attender = _current.attender, attender
    _current.masks = _Masks()
    try:
        yield
    finally:
        _current.attender = before


def current_attender() -> Attender | None:
    """The attender of this thread's forward pass."""
    return _current.attender


@contextmanager
def using_attncore(model: Any, name: str = NAME) -> Iterator[None]:
    """Inside, the model's attention implementation is attncore's, NAME or RECORDING, and that of each model in it."""
    configs = configs_of(model)
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, former in before:  # a whole before its parts, for it sets them, too
            config._attn_implementation = former


def configs_of(model: Any) -> list[Any]:
    """The configurations of a model and of each model in it, with their parts."""
    return [one for module in model.modules() if hasattr(module, "config") for one in _with_parts(module.config)]


def _with_parts(config: Any) -> Iterator[Any]:
    """A configuration, then those of its parts, such as ``text_config``."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from _with_parts(part)


def windows_of(config: Any) -> list[int | None]:
    """What a configuration calls its sliding window, or that of each layer where these differ (``per_layer_config`` of
    transformers, which then refuses to tell of the whole); empty where it has no such field.
    """
    configs = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [one.sliding_window for one in configs if hasattr(one, "sliding_window")]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    """What models call: query, key and value (1, heads, T, size); the result is (1, T, heads, size of a value head)."""
    if torch.compiler.is_compiling() and (found := getattr(module, CACHE, None)) is not None:
        latent = getattr(module, LATENT, None)
        if latent is None:
            return _traced(query, key, value, *found).unsqueeze(0), None
        return latent.expanded(_traced(latent.absorbed(query), key, value, *found)).unsqueeze(0), None
    attender = _current.attender
    if attender is None:
        raise RuntimeError(
            f"{type(module).__name__}: the attention implementation {NAME!r} ran outside its context; run the model "
            "inside `with attncore_context(metadata, kv_caches):`"
        )
    check_one_row(query, attention_mask)
    if asked.get("dropout"):
        raise ValueError("dropout: the model is training; call model.eval()")
    given = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), asked)
    latent = getattr(module, LATENT, None)
    if latent is None:
        return attender.attend(module, *given).unsqueeze(0), None
    return attender.attend_latent(module, latent, *given).unsqueeze(0), None


def check_one_row(tokens: Tensor, attention_mask: Any) -> None:
    """ValueError for what a model is given that attncore does not run: several rows, a mask."""
    if tokens.shape[0] != 1:
        raise ValueError(
            f"input_ids: {counted(tokens.shape[0], 'row')} found; give the tokens of all requests as one row (1, "
            "num_tokens)"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask: a mask was given; give none, since the metadata says who attends to whom")


def _traced(query: Tensor, key: Tensor, value: Tensor, kv_cache: list[Tensor], layer_name: str) -> Tensor:
    """``_attention`` while a layer is compiled: the operator, which finds the step in the forward context."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = query.new_empty((*query.shape[:2], value.shape[2]))
    torch.ops.attncore.attention(query, key, value, kv_cache, output, layer_name)
    return output


def _recorded(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    """``_attention`` that tells its attender of masks, and takes none with a window."""
    masks = _current.masks
    windows = bool(masks.windows)
    seen = {
        "has_window_mask": windows and attention_mask is not None,
        "made_encoder_masks": True in masks.of_encoder,
        "mask_windows": masks.windows if masks.directions else None,
        "longest": masks.longest,
        "made_causal_masks_alone": masks.directions == {False},
        "made_encoder_masks_alone": masks.of_encoder == {True},
    }
    return _attention(module, query, key, value, None if windows else attention_mask, **seen, **asked)


def _window_mask(
    *, config: Any, device: Any, local_size: int | None = None, mask_function: Any = None, **said: Any
) -> Tensor | None:
    """What transformers calls for each mask, of one token here: one where a window is in it, None for all others.

    A window as long as the longest request changes nothing and is none.
    """
    masks, is_of_encoder = _current.masks, "allow_is_bidirectional_skip" in said
    masks.of_encoder.add(is_of_encoder)
    masks.directions.add(is_of_encoder or _sees_later(mask_function, device))
    masks.longest = longest = getattr(config, "max_position_embeddings", None)
    if local_size is None or (longest is not None and local_size >= longest):
        return None
    masks.windows.add(local_size + is_of_encoder)  # of so many on either side; a layer counts the token itself, too
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def _sees_later(mask_function: Any, device: Any) -> bool:
    """Whether token 0 sees token 1; so it may where the function cannot be asked, as of what is kept of each token."""
    first, second = torch.arange(2, device=device)
    try:
        return bool(mask_function(first, first, first, second))
    except (IndexError, RuntimeError, TypeError):
        return True


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(RECORDING, _recorded)
AttentionMaskInterface.register(RECORDING, _window_mask)
