"""The fields of an AttentionRequest from a Hugging Face ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attncore.arguments import integer, positive_integer
from attncore.did_you_mean import meant_by
from attncore.quoted import MOST, one_line, quoted
from attncore.registry.config_json import read_config

_ALIBI_MODELS = ("bloom",)
_OTHER_SLOPES = ("falcon", "RefinedWeb", "RefinedWebModel")
"""Models whose slopes are not the standard ones: Falcon's are divided by the root of the head size."""
_USUAL_ALIBI_BIAS = 8
"""MPT's ``alibi_bias_max`` of the standard slopes."""
_SINK_MODELS = (
    "deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash", "openai_privacy_filter",
)  # fmt: skip
_ENCODERS = (
    "albert", "bert", "bert-generation", "big_bird", "camembert", "canine", "convbert", "data2vec-text", "deberta",
    "deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "ibert", "jina_embeddings_v3",
    "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "luke", "markuplm", "megatron-bert", "mobilebert", "modernbert",
    "mpnet", "neomme", "nomic_bert", "openai_privacy_filter", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "splinter", "squeezebert", "tapas", "tipsv2_text_model", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Models whose tokens see later ones, unless the configuration says ``is_decoder``."""
_NAMES = {
    "num_heads": (
        "num_attention_heads",
        "n_head",
        "num_heads",
        "n_heads",
        "attention_heads",
        "decoder_attention_heads",
    ),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_size": ("head_dim", "attention_head_dim", "kv_channels"),
    "dtype": ("dtype", "torch_dtype"),
    "logits_soft_cap": ("attn_logit_softcapping",),
    "max_model_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
"""What configurations call fields of a request, the usual name first."""
_GROUPED, _GROUPS = "multi_query_attention", "multi_query_group_num"
"""ChatGLM's: without the first, the second says nothing."""
_USUAL_WIDTH = ("hidden_size", "n_embd", "d_model")
_WIDTH = (*_USUAL_WIDTH, "dim", "emb_dim")  # of which images have much like it
_WINDOWS = ("sliding_window", "sliding_window_size")
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_OF_CLASSES: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "attn_logit_softcapping": 50.0, "sliding_window": 4096},
    "gemma3_text": {"head_dim": 256, "sliding_window": 4096},
}
"""What a ``text_config`` leaves out where it is what the class has anyway, as transformers wrote it before version 5,
and what would else be taken for another number, or for nothing."""
_PARTS_OF_PALIGEMMA = ("gemma", "gemma2")
_READ = (
    *_NAMES.values(),
    _USUAL_WIDTH,
    _WINDOWS,
    *((name,) for name in ("kv_lora_rank", "qk_rope_head_dim", "use_sliding_window", "attention_window_size")),
    *((name,) for name in ("attn_config", "text_config", "model_type", "is_encoder_decoder", "multi_query")),
    *((name,) for name in ("v_head_dim", "local_attention", "is_decoder", "is_causal", "use_bidirectional_attention")),
)
"""The entries whose spelling is checked: names of the same thing together."""
_MOST_ENTRIES = 1000
"""Entries of a configuration whose spelling is checked; published ones have some hundreds at most."""
_INDEX = "an index chooses the keys that a token attends to (sparse attention)"
_LEARNT_BIAS = "scores have a learnt bias for the distance of two tokens"
_UNKNOWN_KINDS = {
    "index_topk": _INDEX,
    "index_topk_blocks": _INDEX,  # MiniMax M3, as transformers writes it
    "sparse_attention_config": _INDEX,  # the same, as published
    "relative_attention_num_buckets": _LEARNT_BIAS,
    "position_bias_num_buckets": _LEARNT_BIAS,  # CPM-Ant
    "rel_extent": _LEARNT_BIAS,  # Inkling
}
"""Entries of models whose attention is of another kind -> which."""
_LEARNT = "scores have a learnt part of the distance of two tokens"
_UNKNOWN_VALUES = (
    ("attention_type", "block_sparse", "blocks of keys are left out"),  # BigBird
    ("relative_attention", True, _LEARNT),  # DeBERTa
    ("has_relative_attention_bias", True, _LEARNT),  # LayoutLM
)
"""Entries with a value of which the same is true."""
_UNKNOWN_MODELS = {
    "doge": "a mask that is computed of the values hides keys",
    "funnel": _LEARNT,
    "led": "tokens see a window, and a few of them all",
    "longformer": "tokens see a window, and a few of them all",
    "mra": "scores are approximated",
    "nystromformer": "scores are approximated",
    "pegasus_x": "tokens of the encoder see a block of others, and a few tokens see them all",
    "reformer": "hashes choose the keys that a token attends to",
    "xlnet": _LEARNT,
    "yoso": "scores are approximated",
}
"""The same of models that no entry tells."""
_OTHER_HEAD_SIZES = ("global_head_dim", "swa_head_dim")
"""The size of a head in some of the layers: of full attention (Gemma 4), of a window (MiMo)."""
_WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")
"""Of the models that say a next token. What Mamba 2 calls num_heads are no heads of attention."""


def read(path: str | Path, *, tensor_parallel: int = 1) -> dict[str, Any]:
    """The fields from a file, or from the ``config.json`` of a folder; errors begin with ``config``."""
    try:
        config = read_config(path)
    except ValueError as error:
        raise ValueError(f"config: {error}") from None
    return request_fields(config, tensor_parallel=tensor_parallel)


def request_fields(
    config: Mapping[str, Any], *, tensor_parallel: int = 1, given: Mapping[str, Any] = _NOTHING
) -> dict[str, Any]:
    """The fields of a request for one of ``tensor_parallel`` ranks; ValueError that names the missing,
    misspelt or odd entry.

    ``given`` are fields that the caller asks for in place of the model's: what the configuration says of these, or
    leaves out, is no matter. A model whose layers have heads of several sizes is refused unless ``head_size`` is one of
    them, which says which layers are meant: a backend that has one of the sizes may have no other.

    A model of several parts (text and vision) is described by its ``text_config``. Key/value heads are split among the
    ranks, and repeated where there are fewer of them than ranks; one of both numbers divides the other.
    """
    tensor_parallel = integer("tensor_parallel", tensor_parallel, 1)
    if isinstance(config.get("text_config"), Mapping):
        outer, config = config, config["text_config"]
        config = {**{key: outer[key] for key in ("dtype", "torch_dtype") if key in outer}, **config}
    if without := without_attention(config):
        raise ValueError(f"config: {without}")
    _check_kind(config)
    _check_spelling(config)
    config = {**_of_class(config), **config}
    heads = _heads(config, tensor_parallel, given)
    latent = _optional(config, "kv_lora_rank")
    said: dict[str, Callable[[], Any]] = {
        "num_heads": lambda: heads // tensor_parallel,
        "num_kv_heads": lambda: _kv_heads_of_rank(_kv_heads(config, heads), tensor_parallel),
        "head_size": lambda: 0 if latent else _head_size(config, _optional(config, *_NAMES["num_heads"]) or heads),
        "dtype": lambda: _dtype(config),
        "max_model_len": lambda: _optional(config, *_NAMES["max_model_len"]),
        "sliding_window": lambda: _window(config),
        "logits_soft_cap": lambda: config.get("attn_logit_softcapping"),
        "alibi": lambda: _alibi(config, tensor_parallel),
        "sinks": lambda: config.get("model_type") in _SINK_MODELS,
    }
    fields = {name: of_model() for name, of_model in said.items() if name not in given}
    if latent:  # one latent head holds keys and, as a part of them, values
        rope = 0 if config.get("qk_rope_head_dim") == 0 else _optional(config, "qk_rope_head_dim") or 0
        fields.update(use_mla=True, num_kv_heads=1, head_size=latent + rope, head_size_v=latent)
    elif (of_values := _optional(config, "v_head_dim")) != fields.get("head_size"):
        fields["head_size_v"] = of_values
    if not latent and "head_size" not in given:
        _check_head_sizes(config, fields["head_size"])
    if _is_encoder(config):
        fields["features"] = ("encoder",)
    if config.get("is_encoder_decoder"):
        fields["features"] = ("encoder", "encoder_decoder")
    return {name: value for name, value in fields.items() if value not in (None, False)}


def _of_class(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the class of a model has where its configuration says nothing of it."""
    kind = config.get("model_type")
    return _OF_CLASSES.get(kind, _NOTHING) if isinstance(kind, str) else _NOTHING


def _heads(config: Mapping[str, Any], ranks: int, given: Mapping[str, Any]) -> int:
    """Query heads of the model; those that are ``given`` are of one rank."""
    if "num_heads" in given:
        return max(1, int(given["num_heads"])) * ranks
    if (heads := _optional(config, *_NAMES["num_heads"])) is None:
        raise ValueError(
            f"config: {_NAMES['num_heads'][0]} is missing; where it is left out as what the model's class has anyway, "
            "ask for it (--num-heads); a model that has no attention needs no attention backend"
        )
    if heads % ranks:
        raise ValueError(f"tensor_parallel: {ranks} does not divide the model's number of heads, {quoted(heads)}")
    return heads


def _check_kind(config: Mapping[str, Any]) -> None:
    """ValueError for a model whose attention no backend has, whatever is asked of it."""
    kind = config.get("model_type")
    for name, value, why in (
        *((name, None, why) for name, why in _UNKNOWN_KINDS.items() if _is_stated(config, name)),
        *((name, value, why) for name, value, why in _UNKNOWN_VALUES if config.get(name) == value),
        *(("model_type", kind, why) for one, why in _UNKNOWN_MODELS.items() if one == kind),
    ):
        said = name if value in (None, True) else f"{name}: {value}"
        raise ValueError(f"config: {said}: {why}; no backend of attncore has that")


def _is_stated(config: Mapping[str, Any], name: str) -> bool:
    return isinstance(config.get(name), Mapping) or _optional(config, name) is not None


def without_attention(config: Mapping[str, Any]) -> str:
    """That the model of a configuration has no attention, where its ``model_type`` says so; else empty."""
    kind = config.get("model_type")
    if kind not in _WITHOUT_ATTENTION:
        return ""
    return f"model_type: {kind} has no attention, so it needs no attention backend; give a model that has some"


def _check_spelling(config: Mapping[str, Any]) -> None:
    """ValueError where an entry is spelt like one that is read and that stands there under no name.

    Other unknown entries are left alone: configurations have many that say nothing of attention. Of one that has more
    entries than any published one none is compared: that would take minutes.
    """
    if len(config) > _MOST_ENTRIES:
        return
    lacking = [name for names in _READ if not any(name in config for name in names) for name in names]
    read = {name for names in _READ for name in names}
    for name, value in config.items():
        meant = meant_by(name, lacking) if name not in read else None
        is_list_of_them = meant is not None and name == f"{meant}s" and isinstance(value, list)  # of stages of a model
        if meant and not is_list_of_them:
            raise ValueError(f"config: {one_line(name, MOST)}: no entry that is read; did you mean {meant}?")


def in_words_of_config(text: str, config: Mapping[str, Any], options: Mapping[str, str] | None = None) -> str:
    """``text``, an error of a request, with the names that ``config`` has in place of the request's.

    ``options`` has the fields that come from elsewhere, and what they are called there.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    names = {
        field: next((name for name in names if config.get(name) is not None), field) for field, names in _NAMES.items()
    }
    names |= options or {}
    return re.sub(rf"(?<![\w./'\"-])({'|'.join(names)})(?![\w./'\"-])", lambda found: names[found[1]], text)


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return one_line(dtype, MOST).removeprefix("torch.") or quoted(dtype)


def _optional(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        return positive_integer(f"config: {name}", value)
    return None


def _count(config: Mapping[str, Any], *names: str) -> int:
    if (value := _optional(config, *names)) is None:
        raise ValueError(f"config: {names[0]} is missing")
    return value


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    attention = config.get("attn_config")
    nested = _optional(attention, "kv_n_heads") if isinstance(attention, Mapping) else None
    named = [name for name in _NAMES["num_kv_heads"] if name != _GROUPS or config.get(_GROUPED) is True]
    return nested or _optional(config, *named) or heads


def _kv_heads_of_rank(heads: int, ranks: int) -> int:
    if heads % ranks and ranks % heads:
        raise ValueError(
            f"tensor_parallel: {ranks} ranks can neither share out the {quoted(heads)} key/value heads of the model "
            "evenly nor repeat each as often"
        )
    return max(1, heads // ranks)


def _head_size(config: Mapping[str, Any], heads: int) -> int:
    if stated := _optional(config, *_NAMES["head_size"]):
        return stated
    size = _count(config, *_WIDTH)
    if size % heads:
        raise ValueError(
            f"config: hidden_size {quoted(size)} is no multiple of the number of heads, {quoted(heads)}; state head_dim"
        )
    return size // heads


def _check_head_sizes(config: Mapping[str, Any], usual: int) -> None:
    """ValueError where some layers have heads of another size than ``usual``."""
    found = {name: _optional(config, name) for name in _OTHER_HEAD_SIZES}
    layers = config.get("per_layer_config")
    for number, layer in layers.items() if isinstance(layers, Mapping) else ():
        if isinstance(layer, Mapping):  # as transformers writes it: what one layer has in place of the model's
            found[f"per_layer_config.{one_line(number, MOST)}.head_dim"] = _optional(layer, "head_dim")
    for name, size in found.items():
        if size not in (None, usual):
            raise ValueError(
                f"config: {name}: {quoted(size)}, but heads of other layers have a size of {quoted(usual)}, and a "
                "backend may have one of them alone; ask for each, by the head size (--head-size)"
            )


def _is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether tokens see later ones: by the model's kind, or because a decoder is run so, to embed texts."""
    if config.get("is_causal") is False or _is_gemma_of_both_directions(config):
        return True
    return config.get("model_type") in _ENCODERS and config.get("is_decoder") is not True


def _is_gemma_of_both_directions(config: Mapping[str, Any]) -> bool:
    """True is said of all tokens (Gemma 3), as ``all`` is (Gemma 4), ``vision`` of those of images. Gemma 1 and 2 make
    causal masks all the same: they have it as parts of PaliGemma, where a prompt alone is read so.
    """
    stated = config.get("use_bidirectional_attention")
    return stated == "all" or (stated is True and config.get("model_type") not in _PARTS_OF_PALIGEMMA)


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    if config.get("model_type") == "recurrent_gemma":  # every layer of attention, whose type says nothing of it
        return _optional(config, "attention_window_size")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not any(isinstance(kind, str) and "sliding" in kind for kind in kinds):
        return None
    if (window := _optional(config, *_WINDOWS)) is not None:
        # As a layer passes it: of one side, the token itself included.
        if config.get("model_type") == "openai_privacy_filter":
            return window + 1
        return window // 2 + 1 if _is_gemma_of_both_directions(config) else window
    match config.get("model_type"):
        case "gpt_neo":  # every second layer, unless all are said to be global
            kinds = config.get("attention_types", config.get("attention_layers", "local"))
            return _optional(config, "window_size") if "local" in repr(kinds) else None
        case "modernbert" if both_sides := _optional(config, "local_attention"):
            return both_sides // 2 + 1  # as a layer passes it: of one side, the token itself included
    return None


def _alibi(config: Mapping[str, Any], tensor_parallel: int) -> bool | str:
    """``standard`` where the slopes of a rank's heads are those that a kernel makes by itself for so many heads."""
    kind, attention = config.get("model_type"), config.get("attn_config")
    inner = attention if isinstance(attention, Mapping) else {}
    stated = config.get("alibi") is True or inner.get("alibi") is True
    stated = stated or config.get("position_embedding_type") == "alibi"
    # Baichuan's larger model has slopes, the smaller one rotary positions; nothing but the width tells them apart.
    stated = stated or (kind == "baichuan" and _optional(config, *_WIDTH) not in (None, 4096))
    if not stated and kind not in _ALIBI_MODELS:
        return False
    usual = inner.get("alibi_bias_max", _USUAL_ALIBI_BIAS) == _USUAL_ALIBI_BIAS
    return "standard" if tensor_parallel == 1 and usual and kind not in _OTHER_SLOPES else True
