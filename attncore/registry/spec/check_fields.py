"""What makes sense in a spec: every field normalised, every problem found, none of them hidden behind the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from attncore.env import NAME
from attncore.frozen_map import FrozenMap
from attncore.registry import requirements
from attncore.registry.devices import FORMS, is_pattern
from attncore.registry.spec.sizes import as_sizes
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
)

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
Values = dict[str, Any]


def normalise(given: Values) -> tuple[Values, list[str]]:
    """The fields of a spec made immutable, and a sentence for each that makes no sense (beginning with its name)."""
    values, problems = dict(given), []
    for name, check in _CHECKS.items():
        try:
            values[name] = check(name, given[name])
        except ValueError as error:
            problems.append(str(error))
    if not problems:
        problems.extend(_together(values))
    return values, problems


def _together(values: Values) -> Iterable[str]:
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
            raise ValueError(f"{field}: {device!r} is no device; the forms are {FORMS}")
        if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= 100:
            raise ValueError(f"{field}: the priority of {device!r} is {priority!r}, not an integer from 0 to 100")
    return FrozenMap(dict(value))


def _words(field: str, value: object, known: Collection[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {value!r} is not a collection of words")
    words = tuple(value)
    for word in words:
        if word not in known:
            raise ValueError(f"{field}: {word!r} is not one of {', '.join(known)}")
    return words


def _some(known: Collection[str]) -> Callable[[str, object], frozenset[str]]:
    def check(field: str, value: object) -> frozenset[str]:
        words = _words(field, value, known)
        if not words:
            raise ValueError(f"{field}: nothing is declared; the words are {', '.join(known)}")
        return frozenset(words)

    return check


def _any(known: Collection[str]) -> Callable[[str, object], frozenset[str]]:
    return lambda field, value: frozenset(_words(field, value, known))


def _ordered(known: Collection[str]) -> Callable[[str, object], tuple[str, ...]]:
    def check(field: str, value: object) -> tuple[str, ...]:
        if isinstance(value, set | frozenset) and len(value) > 1:
            raise ValueError(f"{field}: a set has no order; give a tuple, the preferred one first")
        if not (words := _words(field, value, known)):
            raise ValueError(f"{field}: nothing is declared; the words are {', '.join(known)}")
        return tuple(dict.fromkeys(words))

    return check


def _one(known: Collection[str]) -> Callable[[str, object], str]:
    def check(field: str, value: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{field}: {value!r} is not one of {', '.join(known)}")
        return value

    return check


def _texts(field: str, value: object) -> Mapping[str, str]:
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
    found = tuple(value)
    for one in found:
        try:
            requirements.parse(one)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from None
    return found


def _limit(field: str, value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{field}: {value!r} is neither None nor a positive integer")
    return value


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field}: {value!r} is neither True nor False")
    return value


def _pad(field: str, value: object) -> int:
    if value not in (0, 1) or isinstance(value, bool):
        raise ValueError(f"{field}: {value!r} is neither 0 nor 1")
    return int(value == 1)


def _options(field: str, value: object) -> Mapping[str, Any]:
    from attncore.registry.spec.backend_spec import Option

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


def _variants(field: str, value: object) -> tuple[Any, ...]:
    from attncore.registry.spec.backend_spec import Variant

    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{field}: {value!r} is not a collection of Variant")
    found = tuple(value)
    for one in found:
        if not isinstance(one, Variant):
            raise ValueError(f"{field}: {one!r} is not a Variant")
        _name(field, one.name)
        _requires(field, one.requires)
    if len({one.name for one in found}) < len(found):
        raise ValueError(f"{field}: two variants have the same name")
    return found


_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "name": _name,
    "factory": _factory,
    "devices": _devices,
    "dtypes": _some(DTYPES),
    "kv_cache_dtypes": _some(KV_CACHE_DTYPES),
    "head_sizes": as_sizes,
    "block_sizes": as_sizes,
    "preferred_block_size": _limit,
    "kv_cache_layouts": _ordered(KV_CACHE_LAYOUTS),
    "features": _any(FEATURES),
    "unsupported": _texts,
    "cuda_graph": _one(GRAPH_LEVELS),
    "needs": _any(NEEDS),
    "requires": _requires,
    "phases": _some(PHASES),
    "head_size_v": lambda field, value: None if value is None else as_sizes(field, value),
    "use_mla": _flag,
    "mla_only": _flag,
    "max_group_size": _limit,
    "max_model_len": _limit,
    "max_block_id": _limit,
    "workspace_bytes": _limit,
    "compiles_at_run_time": _flag,
    "finite_tail": _flag,
    "host_lengths": _one(HOST_LENGTHS),
    "plan_staging": _one(PLAN_STAGING),
    "pad_seq_len": _pad,
    "options": _options,
    "notes": _notes,
    "check": _check,
    "variants": _variants,
}
