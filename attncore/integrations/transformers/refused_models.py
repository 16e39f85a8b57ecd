"""Models that attncore cannot run as one row of tokens over paged caches, and why."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from transformers.cache_utils import DynamicCache

from attncore.integrations.transformers.attention_interface import windows_of
from attncore.integrations.transformers.checked_model import check_model
from attncore.integrations.transformers.recurrent_layers import RECURRENT_LAYER_TYPES, recurrent_layers
from attncore.show import counted

_LAYER_TYPES = frozenset(("full_attention", "sliding_attention", "moe", "sparse", "dense"))
"""The layer types of a configuration that attncore runs: full and sliding attention; and kinds of MLPs."""


def refuse_layers(model: Any) -> None:
    """TypeError for what is no model, ValueError for one with layers that keep what attncore does not know, or whose
    numbers follow the batch.
    """
    check_model(model, configured=True)
    name, whole = type(model).__name__, model.config
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    if getattr(whole, "is_encoder_decoder", False):
        raise ValueError(f"model: {name} has an encoder beside its decoder; run models of one of them")
    recurrent = recurrent_layers(model)
    known = _LAYER_TYPES | RECURRENT_LAYER_TYPES if recurrent else _LAYER_TYPES
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others or (getattr(model, "_is_stateful", False) and not recurrent):
        raise ValueError(
            f"model: {name} has layers of type {', '.join(others) or 'recurrent'}; attncore runs full and sliding "
            "attention, and recurrent layers that keep their states in transformers' cache"
        )
    if getattr(config, "trigram_input", False):
        raise ValueError(
            f"model: {name} makes each token's embedding of its neighbours' too, and so of other requests' where they "
            "run as one row; it runs without trigram_input alone"
        )
    _refuse_dynamic_quantisation(model)
    _refuse_counted_masks(model)
    _refuse_moving_frequencies(model, config)
    _refuse_counted_temperatures(model)


def refuse_positions(model: Any, is_decoder: bool) -> None:
    """ValueError for a model that counts tokens by itself, or a decoder that counts positions from another than 0."""
    name = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"model: {name} takes no position_ids and counts tokens by itself, so that requests cannot run as one row"
        )
    shifted = _first_position(model)
    if shifted and is_decoder:
        raise ValueError(
            f"model: {name} counts positions from {shifted}, after its padding token, and metadata from 0; of such "
            "models, encoders alone run, with position_ids = metadata.positions + padding_idx + 1"
        )


def refuse_forgetful_cache(model: Any) -> None:
    """ValueError for a decoder none of whose layers has a window, while transformers' cache keeps the last tokens alone
    of each: its own ``generate`` says something else then than it would over all tokens.
    """
    try:
        config = model.config.get_text_config(decoder=True)
        kept: list[Any] = DynamicCache(config=config).layers
    except Exception:  # of a configuration that such a cache is not for
        return
    windows = [layer.sliding_window for layer in kept if getattr(layer, "is_sliding", False)]
    longest = getattr(config, "max_position_embeddings", None)
    if windows and (longest is None or min(windows) < longest):
        window = min(windows)
        raise ValueError(
            f"model: {type(model).__name__} has config.sliding_window {window}, by which transformers' cache keeps so "
            "many tokens, and neither its layers nor its masks have a window, so that it would attend to all tokens; "
            f"for requests no longer than {window} set config.max_position_embeddings of the loaded model to {window}; "
            "for longer ones set config.sliding_window to None if the model was trained without a window, or take one "
            "whose layers pass it"
        )


def refuse_lost_window(name: str, module: Any) -> NoReturn:
    """ValueError for a layer whose window is only in the mask that its model makes, which attncore does not read."""
    window = min((window for window in windows_of(getattr(module, "config", None)) if window), default=None)
    limit = "its window" if window is None else window
    raise ValueError(
        f"layer {name}: {type(module).__name__} has a sliding window, {window}, in the mask that its model makes, and "
        f"passes none to its attention, so that it would attend to all tokens; for requests no longer "
        f"than {limit} set config.max_position_embeddings of the loaded model to {limit}; for longer ones take a model "
        "whose layers pass sliding_window"
    )


def refuse_other_window(name: str, module: Any, window: int, of_mask: int | None) -> NoReturn:
    """ValueError for a layer whose mask has another window than it passes to its attention, or none.

    So has a model whose ``config.sliding_window`` was changed after it was made, and a decoder with windows whose
    ``config.is_causal`` is False: transformers' eager attention goes by the mask, and its flash attention by what the
    layer passes.
    """
    has, limit = (
        ("none", window) if of_mask is None else (f"{of_mask}, the token itself included", min(of_mask, window))
    )
    raise ValueError(
        f"layer {name}: {type(module).__name__} passes the sliding window {window} to its attention, and the mask that "
        f"its model makes has {has}; for requests no longer than {limit} set config.max_position_embeddings of the "
        f"loaded model to {limit}; for longer ones make the model with the window that both are to have, or take "
        "another model"
    )


def refuse_other_direction(name: str, module: Any, causal: bool) -> NoReturn:
    """ValueError for a layer that says that it is causal, or not, in a model all of whose masks say the opposite."""
    if causal:
        says, makes, other = "causal", "masks for an encoder alone", "True"
    else:
        says, makes, other = "not causal", "causal masks alone", "False"
    raise ValueError(
        f"layer {name}: {type(module).__name__} says that it is {says}, and its model makes {makes}; set is_causal of "
        f"each such module to {not causal}, or config.is_causal to {other}, whichever the model was trained with"
    )


def refuse_unsaid_direction(name: str, module: Any) -> NoReturn:
    """ValueError for a layer without ``is_causal`` in a model whose masks let tokens see later ones."""
    raise ValueError(
        f"layer {name}: {type(module).__name__} does not say whether it is causal, in a model that makes masks for an "
        "encoder; set is_causal of each such module: False where a token sees those behind it"
    )


def _first_position(model: Any) -> int:
    """What a model counts positions from: 0, or more for RoBERTa and its like, which have a row for padding before.

    The module is called ``position_embeddings`` there, and ``embed_positions`` in Kosmos-2 and 2.5.
    """
    for name, module in model.named_modules():
        if "position" in name.rpartition(".")[2] and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def _refuse_dynamic_quantisation(model: Any) -> None:
    """ValueError for layers that round their inputs by the largest number of the whole row, of any request."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise ValueError(
                f"model: {name} is quantised dynamically (torch.ao), by the largest number of a step's tokens, so that "
                "a request would change those beside it; take the model before quantize_dynamic, or one of which the "
                "weights alone are quantised"
            )


def _refuse_counted_masks(model: Any) -> None:
    """ValueError for embeddings that are scaled by how many tokens of the row, of any request, are masks (ESM)."""
    for name, module in model.named_modules():
        if getattr(module, "token_dropout", False) is True:
            raise ValueError(
                f"model: {name or type(module).__name__} scales its embeddings by how many of a step's tokens are "
                "masks (token_dropout), so that a request would change those beside it; take a model that was trained "
                "without token_dropout"
            )


def _refuse_moving_frequencies(model: Any, config: Any) -> None:
    """ValueError for rotary embeddings whose frequencies depend on the largest position in the row, of any request."""
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
                    f"for requests of up to {counted(limit, 'token')} set config.max_position_embeddings of the "
                    f"loaded model to {limit}; for longer ones take a model of rope type default, linear, yarn or "
                    "llama3"
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


def _refuse_counted_temperatures(model: Any) -> None:
    """ValueError for layers that scale a query by its place in the row, whichever request it is of."""
    for name, module in model.named_modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            raise ValueError(
                f"layer {name}: {type(module).__name__} scales a query by its place in the row, which it counts by "
                "itself (attn_temperature_tuning), so that a request would change those beside it; for requests of "
                f"fewer than {counted(module.floor_scale, 'token')}, none of which is scaled, set "
                "attn_temperature_tuning of each such module to False"
            )
