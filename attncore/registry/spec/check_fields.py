"""Checks of a spec's fields: each is made immutable, and every bad one is reported, not the first alone.

A checked value holds no object of a plugin but its ``check``: a collection, a string or an integer of a plugin's own
class is read once, into an exact one (``plain_values``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from attncore.arguments import INT32_MAX, UNREADABLE, integer_or_none
from attncore.did_you_mean import did_you_mean
from attncore.env import NAME, VARIABLES, variable_prefix
from attncore.frozen_map import FrozenMap
from attncore.quoted import one_line, quoted
from attncore.registry import package_requirements
from attncore.registry.device_patterns import PATTERNS, is_pattern
from attncore.registry.spec.option import Option
from attncore.registry.spec.plain_values import collection, mapping, positive, text
from attncore.registry.spec.sizes import as_sizes, describe, smallest, smallest_from
from attncore.registry.spec.variant import Variant
from attncore.step_arrays import FIELD_NAMES, OF_LENGTHS
from attncore.vocabulary import (
    DTYPES,
    FEATURES,
    GRAPH_LEVELS,
    HOST_LENGTHS,
    KV_CACHE_DTYPES,
    KV_CACHE_LAYOUTS,
    PAD_SEQ_LEN,
    PHASES,
    PLAN_STAGING,
    dtype_name,
)

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_VARIABLE = re.compile(r"ATTNCORE_[A-Z0-9_]{1,100}")
Values = dict[str, Any]


def check_fields(given: Values, checked: Values | None = None) -> tuple[Values, list[str]]:
    """The fields of a spec made immutable, and a sentence for each bad one, which begins with its name.

    Those of ``checked`` are of a spec that has been checked; what a variant of it has in their place is ``given``.
    """
    values, problems = {**(checked or {}), **given}, []
    for name, check in _CHECKS.items():
        if name not in given:
            continue
        try:
            values[name] = check(name, given[name])
        except UNREADABLE as error:  # one of Python's or NumPy's own does not begin with the field's name
            text = str(error)
            problems.append(text if text.startswith(f"{name}: ") else f"{name}: {text}")
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
    heads, of_values = values["head_sizes"], values["head_size_v"]
    size = smallest_from(heads, smallest(of_values) if values["mla_only"] and of_values is not None else 1)
    if size is not None and size > INT32_MAX:
        yield f"head_sizes: {quoted(size)} is the smallest, and sizes that a request asks for fit int32"
    if size is None:
        yield (
            f"head_size_v: {describe(of_values)}, but with mla_only values are the first columns of a row of "
            f"head_sizes, {describe(heads)}, none of which is as large"
        )
    for variable in values["variables"]:
        if not variable.startswith(prefix := variable_prefix(values["name"])):
            yield f"variables: {quoted(variable)} does not begin with {prefix}"
    for feature, more in (("kv_scales", "kv_scales_on_device"), ("kv_scales_on_device", "kv_scales_per_head")):
        if more in values["features"] and feature not in values["features"]:
            yield f"features: {more!r} is declared without {feature!r}, which it is more of"
    if values["host_lengths"] == "none" and (read := sorted(OF_LENGTHS & values["host_needs"])):
        yield (
            f"host_lengths: 'none' says that no length is read on the host, but host_needs names {', '.join(read)}; "
            "state 'exact', or 'bounded' where upper bounds of them will do"
        )
    for feature in sorted(values["features"] & values["unsupported"].keys()):
        yield f"unsupported: {feature!r} is also among features"


def _name(field: str, value: object) -> str:
    wrong = "not a name of lower-case letters, digits, '-', '_' and '.'"
    if not NAME.fullmatch(name := text(field, value, wrong)):
        raise ValueError(f"{field}: {quoted(name)} is {wrong}")
    return name


def _factory(field: str, value: object) -> str:
    wrong = "not of the form 'package.module:Class'"
    if not _FACTORY.fullmatch(path := text(field, value, wrong)):
        raise ValueError(f"{field}: {quoted(path)} is {wrong}")
    return path


def _devices(field: str, value: object) -> Mapping[str, int]:
    wrong = "not a mapping of devices to priorities"
    devices = {}
    for device, given in mapping(field, value, wrong):
        if not is_pattern(device):
            raise ValueError(f"{field}: {quoted(device)} is no device; write one of {PATTERNS}")
        priority = integer_or_none(given)
        if priority is None or not 0 <= priority <= 100:
            raise ValueError(f"{field}: the priority of {device!r} is {quoted(given)}, not an integer from 0 to 100")
        devices[device] = priority
    if not devices:
        raise ValueError(f"{field}: {quoted(value)} is {wrong}")
    return FrozenMap(devices)


def _words(field: str, value: object, known: Collection[str]) -> tuple[str, ...]:
    return tuple(_word_of(field, word, known) for word in collection(field, value, "not a collection of words"))


def _word_of(field: str, value: object, known: Collection[str]) -> str:
    wrong = f"not one of {', '.join(known)}"
    if (word := text(field, dtype_name(value), wrong)) not in known:
        raise ValueError(f"{field}: {quoted(word)} is {wrong}{did_you_mean(word, known)}")
    return word


def _words_at_least_one(known: Collection[str]) -> Callable[[str, object], frozenset[str]]:
    def check(field: str, value: object) -> frozenset[str]:
        words = _words(field, value, known)
        if not words:
            raise ValueError(f"{field}: nothing is declared; the words are {', '.join(known)}")
        return frozenset(words)

    return check


def _words_or_none(known: Collection[str]) -> Callable[[str, object], frozenset[str]]:
    return lambda field, value: frozenset(_words(field, value, known))


def _metadata_fields(field: str, value: object) -> frozenset[str]:
    names = [text(field, name, "not a name") for name in collection(field, value, "not a collection of names")]
    for name in names:
        if name not in FIELD_NAMES:
            raise ValueError(f"{field}: {quoted(name)} is no field of metadata{did_you_mean(name, FIELD_NAMES)}")
    return frozenset(names)


def _ordered_words(known: Collection[str]) -> Callable[[str, object], tuple[str, ...]]:
    def check(field: str, value: object) -> tuple[str, ...]:
        words = _words(field, value, known)
        if isinstance(value, set | frozenset) and len(words) > 1:
            raise ValueError(f"{field}: a set has no order; give a tuple, the preferred one first")
        if not words:
            raise ValueError(f"{field}: nothing is declared; the words are {', '.join(known)}")
        if (twice := next((word for word in words if words.count(word) > 1), None)) is not None:
            raise ValueError(f"{field}: {twice!r} stands twice; give each once, the preferred one first")
        return words

    return check


def _word(known: Collection[str]) -> Callable[[str, object], str]:
    return lambda field, value: _word_of(field, value, known)


def _unsupported(field: str, value: object) -> Mapping[str, str]:
    reasons = {}
    for feature, why in mapping(field, value, "not a mapping of features to sentences"):
        _word_of(field, feature, FEATURES)
        if not (sentence := one_line(text(field, why, f"not a sentence, the reason for {feature!r}"))):
            raise ValueError(f"{field}: the reason for {feature!r} is {quoted(why)}, not a sentence")
        reasons[feature] = sentence
    return FrozenMap(reasons)


def _variables(field: str, value: object) -> Mapping[str, str]:
    variables = {}
    for name, what in mapping(field, value, "not a mapping of environment variables to sentences"):
        if not _VARIABLE.fullmatch(name) or name in VARIABLES:
            raise ValueError(f"{field}: {quoted(name)} is not the name of a plugin's variable, ATTNCORE_<NAME>_...")
        if not (sentence := one_line(text(field, what, f"not a sentence that says what {name} does"))):
            raise ValueError(f"{field}: {name} does {quoted(what)}, not a sentence")
        variables[name] = sentence
    return FrozenMap(variables)


def _notes(field: str, value: object) -> tuple[str, ...]:
    notes = []
    for note in collection(field, value, "not a collection of sentences"):
        wrong = "not a sentence on one line"
        if not (sentence := text(field, note, wrong)) or "\n" in sentence:
            raise ValueError(f"{field}: {quoted(note)} is {wrong}")
        notes.append(one_line(sentence))
    return tuple(notes)


def _requires(field: str, value: object) -> tuple[str, ...]:
    texts = collection(field, value, "not a collection of requirements")
    requires = tuple(text(field, one, "not a requirement such as 'acme-kernels>=2,<3'") for one in texts)
    for one in requires:
        try:
            package_requirements.needed([one])
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from None
    return requires


def _install(field: str, value: object) -> Mapping[str, str]:
    found = {}
    for name, advice in mapping(field, value, "not a mapping from distributions to advice"):
        sentence = text(field, advice, "not a text")
        found[text(field, name, "not the name of a distribution")] = one_line(sentence)
    return FrozenMap(found)


def _optional_positive(field: str, value: object) -> int | None:
    return None if value is None else positive(field, value)


def _flag(field: str, value: object) -> bool:
    if value is not True and value is not False:
        raise ValueError(f"{field}: {quoted(value)} is neither True nor False")
    return value is True


def _pad(field: str, value: object) -> int:
    length = integer_or_none(value)
    if length is None or length not in PAD_SEQ_LEN:
        raise ValueError(f"{field}: {quoted(value)} is neither 0 nor 1")
    return length


def _options(field: str, value: object) -> Mapping[str, Option]:
    options = {}
    for name, option in mapping(field, value, "not a mapping of names to Option"):
        if not name.isidentifier():
            raise ValueError(f"{field}: {quoted(name)} is not an identifier")
        if not isinstance(option, Option):
            raise ValueError(f"{field}: {quoted(name)} is {quoted(option)}, not an Option")
        options[name] = Option(option.type, option.help, option.default, option.choices)
    return FrozenMap(options)


def _check(field: str, value: object) -> object:
    if value is not None and not callable(value):
        raise ValueError(f"{field}: {quoted(value)} cannot be called")
    return value


def _variants(field: str, value: object) -> tuple[Variant, ...]:
    variants = []
    for variant in collection(field, value, "not a collection of Variant"):
        if not isinstance(variant, Variant):
            raise ValueError(f"{field}: {quoted(variant)} is not a Variant")
        requires, facts = _requires(field, variant.requires), dict(mapping(field, variant.facts, "not a mapping"))
        variants.append(Variant(_name(field, variant.name), requires=requires, **facts))  # type: ignore[arg-type]
    if len({variant.name for variant in variants}) < len(variants):
        raise ValueError(f"{field}: two variants have the same name")
    return tuple(variants)


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
    "host_needs": _metadata_fields,
    "device_needs": _metadata_fields,
    "requires": _requires,
    "install": _install,
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
    "finite_passed_blocks": _flag,
    "host_lengths": _word(HOST_LENGTHS),
    "plan_staging": _word(PLAN_STAGING),
    "pad_seq_len": _pad,
    "options": _options,
    "variables": _variables,
    "notes": _notes,
    "check": _check,
    "variants": _variants,
}
