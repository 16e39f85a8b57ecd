"""A spec's facts as JSON types and in words, variant by variant: what `attncore show` and the capability matrix say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from attncore import vocabulary
from attncore.registry.device_patterns import in_order, without_contained
from attncore.registry.spec import sizes
from attncore.registry.spec.backend_spec import BackendSpec
from attncore.registry.spec.option import Option
from attncore.registry.spec.sizes import MultipleOf

_SENTENCES: Mapping[str, Mapping[Any, str]] = {
    "cuda_graph": vocabulary.GRAPH_LEVELS,
    "host_lengths": vocabulary.HOST_LENGTHS,
    "plan_staging": vocabulary.PLAN_STAGING,
    "pad_seq_len": vocabulary.PAD_SEQ_LEN,
    "finite_tail": vocabulary.FINITE_TAIL,
    "finite_passed_blocks": vocabulary.FINITE_PASSED_BLOCKS,
}
"""Field -> what each of its words means."""

_ORDERS = {"dtypes": vocabulary.DTYPES, "kv_cache_dtypes": vocabulary.KV_CACHE_DTYPES, "phases": vocabulary.PHASES}
"""Field -> the order in which its words are listed; others are sorted."""

_TABLES = ("name", "api", "features", "unsupported", "options", "requires", "install", "variables", "notes", "variants")
"""Fields that are no plain facts: each has a table of its own, or is the subject."""


def facts_as_json(spec: BackendSpec) -> dict[str, Any]:
    """Every field of a spec as JSON types, but for its ``variants``."""
    return {one.name: _json(one.name, getattr(spec, one.name)) for one in fields(spec) if one.name != "variants"}


def plain_facts(spec: BackendSpec) -> dict[str, str]:
    """The facts of a spec, in words: field -> its value and what that means. Fields without a value are left out."""
    given = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in _TABLES}
    return {name: _words(name, value) for name, value in given.items() if value is not None}


def has_feature(spec: BackendSpec, name: str) -> bool:
    """Whether a spec declares a feature, or one that includes it: any slopes include the standard ones."""
    return name in spec.features or (name == "alibi_standard" and "alibi" in spec.features)


def feature_states(spec: BackendSpec) -> dict[str, tuple[str, str]]:
    """Feature -> ``yes``, ``no`` or ``not declared``, and what it means or why the backend does not have it."""
    return {
        name: ("yes", text)
        if has_feature(spec, name)
        else ("no", spec.unsupported[name])
        if name in spec.unsupported
        else ("not declared", text)
        for name, text in vocabulary.FEATURES.items()
    }


def by_variant(spec: BackendSpec, read: Callable[[BackendSpec], Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """``read`` of each variant's spec gives name -> value: rows (name, the variants that have the value, the value).

    The variants are ``""`` where all have it. A variant whose mapping lacks the name is in no row of it.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for variant, stated in spec.by_variant:
        for name, value in read(stated).items():
            found.setdefault(name, {}).setdefault(value, []).append(variant)
    count = len(spec.by_variant)
    return [
        (name, "" if len(variants) == count else ", ".join(variants), value)
        for name, values in found.items()
        for value, variants in values.items()
    ]


def _json(name: str, value: Any) -> Any:
    if isinstance(value, MultipleOf) or name in ("head_sizes", "block_sizes"):
        return sizes.as_json(value)
    if isinstance(value, frozenset):
        return _ordered(name, value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {key: _option(one) if isinstance(one, Option) else one for key, one in value.items()}
    return value is not None if name == "check" else value


def _option(option: Option) -> dict[str, Any]:
    return {
        "type": option.type.__name__,
        "default": option.default,
        "choices": list(option.choices),
        "help": option.help,
    }


def _words(name: str, value: Any) -> str:
    if isinstance(value, MultipleOf) or name in ("head_sizes", "block_sizes", "head_size_v"):
        return sizes.describe(value)
    if name in _SENTENCES:
        word = ("yes" if value else "no") if isinstance(value, bool) else value
        return f"{word}: {_SENTENCES[name][value]}"
    if name == "devices":
        text = ", ".join(f"{pattern} (priority {value[pattern]})" for pattern in in_order(value))
        # Else a reader of "cuda:sm_80+ (priority 50), cuda:sm_90 (priority 55)" has to guess which one sm_90 has.
        return text if len(without_contained(value)) == len(value) else f"{text}; the closest entry counts"
    if name == "check":
        return "has a check of its own, which knows what no field says"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset | tuple):
        return ", ".join(_ordered(name, value) if isinstance(value, frozenset) else map(str, value)) or "none"
    return str(value)


def _ordered(name: str, words: frozenset[Any]) -> list[Any]:
    order = _ORDERS.get(name)
    return sorted(words, key=order.index) if order else sorted(words)
