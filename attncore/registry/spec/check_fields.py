"""Checks of a spec's fields: each is made immutable, and every bad one is reported, not the first alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from attncore.arguments import integer_or_none, positive_integer
from attncore.did_you_mean import did_you_mean
from attncore.env import NAME
from attncore.frozen_map import FrozenMap
from attncore.registry import package_requirements
from attncore.registry.device_patterns import PATTERNS, is_pattern
from attncore.registry.spec.option import Option
from attncore.registry.spec.sizes import as_sizes
from attncore.registry.spec.variant import Variant
from attncore.vocabulary import (
    DTYPES,
    FEATURES,
    GRAPH_LEVELS,
    HOST_LENGTHS,
    KV_CACHE_DTYPES,
    KV_CACHE_LAYOUTS,
    NEEDS,
    PHASES,
    PLAN_STAGING,
    dtype_name,
)

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
Values = dict[str, Any]


def check_fields(given: Values) -> tuple[Values, list[str]]:
    """The fields of a spec made immutable, and a sentence for each bad one, which begins with its name."""
    values, problems = dict(given), []
    for name, check in _CHECKS.items():
        try:
            values[name] = check(name, given[name])
        except ValueError as error:
            problems.append(str(error))
    if not problems:
        problems.extend(_contradictions(values))
    return values, problems


def _contradictions(values: Values) -> Iterable[str]:
    """Problems of fields that are good alone."""
    preferred, sizes = values["preferred_block_size"], values["block_sizes"]
    if preferred is not None and preferred not in sizes:
        yield f"preferred_block_size: {preferred} is not among block_sizes"
    if values["mla_only"] and not values["use_mla"]:
        yield "mla_only: True, but use_mla is False"
    for feature in sorted(values["features"] & values["unsupported"].keys()):
        yield f"unsupported: {feature!r} is also among features"


def _name(field: str, value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{field}: {value!r} is not a name of lower-case letters, digits, '-', '_' and '.'")
    return value


def _factory(field: str, value: object) -> str:
    if not isinstance(value, str) or not _FACTORY.fullmatch(value):
        raise ValueError(f"{field}: {value!r} is not of the form 'package.module:Class'")
    return value


def _devices(field: str, value: object) -> Mapping[str, int]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{field}: {value!r} is not a mapping of devices to priorities")
    for device, priority in value.items():
        if not is_pattern(device):
            raise ValueError(f"{field}: {device!r} is no device; write one of {PATTERNS}")
        if integer_or_none(priority) is None or not 0 <= priority <= 100:
            raise ValueError(f"{field}: the priority of {device!r} is {priority!r}, not an integer from 0 to 100")
    return FrozenMap({device: int(priority) for device, priority in value.items()})


def _words(field: str, value: object, known: Collection[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {value!r} is not a collection of words")
    words = tuple(dtype_name(word) for word in value)
    for word in words:
        if word not in known:
            raise ValueError(f"{field}: {word!r} is not one of {', '.join(known)}{did_you_mean(word, known)}")
    return words


def _words_at_least_one(known: Collection[str]) -> Callable[[str, object], frozenset[str]]:
    def check(field: str, value: object) -> frozenset[str]:
        words = _words(field, value, known)
        if not words:
            raise ValueError(f"{field}: nothing is declared; the words are {', '.join(known)}")
        return frozenset(words)

    return check


def _words_or_none(known: Collection[str]) -> Callable[[str, object], frozenset[str]]:
    return lambda field, value: frozenset(_words(field, value, known))


def _ordered_words(known: Collection[str]) -> Callable[[str, object], tuple[str, ...]]:
    def check(field: str, value: object) -> tuple[str, ...]:
        if isinstance(value, set | frozenset) and len(value) > 1:
            raise ValueError(f"{field}: a set has no order; give a tuple, the preferred one first")
        if not (words := _words(field, value, known)):
            raise ValueError(f"{field}: nothing is declared; the words are {', '.join(known)}")
        return tuple(dict.fromkeys(words))

    return check


def _word(known: Collection[str]) -> Callable[[str, object], str]:
    def check(field: str, value: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{field}: {value!r} is not one of {', '.join(known)}{did_you_mean(value, known)}")
        return value

    return check


def _unsupported(field: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: {value!r} is not a mapping of features to sentences")
    _words(field, value, FEATURES)
    for feature, text in value.items():
        if not isinstance(text, str) or not text:
            raise ValueError(f"{field}: the reason for {feature!r} is {text!r}, not a sentence")
    return FrozenMap(dict(value))


def _notes(field: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {value!r} is not a collection of sentences")
    notes = tuple(value)
    for note in notes:
        if not isinstance(note, str) or not note or "\n" in note:
            raise ValueError(f"{field}: {note!r} is not a sentence on one line")
    return notes


def _requires(field: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {value!r} is not a collection of requirements")
    texts = tuple(value)
    for text in texts:
        try:
            package_requirements.parse(text)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from None
    return texts


def _optional_positive(field: str, value: object) -> int | None:
    return None if value is None else positive_integer(field, value)


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field}: {value!r} is neither True nor False")
    return value


def _pad(field: str, value: object) -> int:
    if value not in (0, 1) or isinstance(value, bool):
        raise ValueError(f"{field}: {value!r} is neither 0 nor 1")
    return int(value == 1)


def _options(field: str, value: object) -> Mapping[str, Option]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: {value!r} is not a mapping of names to Option")
    for name, option in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{field}: {name!r} is not an identifier")
        if not isinstance(option, Option):
            raise ValueError(f"{field}: {name!r} is {option!r}, not an Option")
    return FrozenMap(dict(value))


def _check(field: str, value: object) -> object:
    if value is not None and not callable(value):
        raise ValueError(f"{field}: {value!r} cannot be called")
    return value


def _variants(field: str, value: object) -> tuple[Variant, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {value!r} is not a collection of Variant")
    variants = tuple(value)
    for variant in variants:
        if not isinstance(variant, Variant):
            raise ValueError(f"{field}: {variant!r} is not a Variant")
        _name(field, variant.name)
        _requires(field, variant.requires)
    if len({variant.name for variant in variants}) < len(variants):
        raise ValueError(f"{field}: two variants have the same name")
    return variants


_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "name": _name,
    "factory": _factory,
    "devices": _devices,
    "dtypes": _words_at_least_one(DTYPES),
    "kv_cache_dtypes": _words_at_least_one(KV_CACHE_DTYPES),
    "head_sizes": as_sizes,
    "block_sizes": as_sizes,
    "preferred_block_size": _optional_positive,
    "kv_cache_layouts": _ordered_words(KV_CACHE_LAYOUTS),
    "features": _words_or_none(FEATURES),
    "unsupported": _unsupported,
    "cuda_graph": _word(GRAPH_LEVELS),
    "needs": _words_or_none(NEEDS),
    "requires": _requires,
    "phases": _words_at_least_one(PHASES),
    "head_size_v": lambda field, value: None if value is None else as_sizes(field, value),
    "use_mla": _flag,
    "mla_only": _flag,
    "max_group_size": _optional_positive,
    "max_model_len": _optional_positive,
    "max_block_id": _optional_positive,
    "workspace_bytes": _optional_positive,
    "compiles_at_run_time": _flag,
    "finite_tail": _flag,
    "host_lengths": _word(HOST_LENGTHS),
    "plan_staging": _word(PLAN_STAGING),
    "pad_seq_len": _pad,
    "options": _options,
    "notes": _notes,
    "check": _check,
    "variants": _variants,
}
