"""``--option NAME=VALUE`` of the commands: options of one backend, read as its spec declares them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attncore.arguments import real_number, whole_number_of_63_bits
from attncore.command import UsageError
from attncore.did_you_mean import did_you_mean
from attncore.quoted import listed, quoted
from attncore.registry.plugins.load import registry
from attncore.registry.spec.option import Option

_TRUTHS = {"true": True, "false": False}
_READERS: dict[type, Callable[[str], Any]] = {
    bool: lambda text: _TRUTHS.get(text.lower(), text),
    int: whole_number_of_63_bits,
    float: real_number,
    str: str,
}


def add_option_argument(parser: argparse._ActionsContainer, backend: str) -> None:
    """The option ``--option``, of the backend that the argument ``backend`` of the same command names."""
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"an option of the backend that {backend} names, as its spec declares it; may be given several times",
    )


def options_of(backend: str | None, words: Sequence[str], argument: str) -> dict[str, Any]:
    """The options that ``words`` (NAME=VALUE) give the backend of this name, each of its declared type.

    UsageError where none is named (by ``argument``), for a name that its spec does not declare, is given twice, or has
    a value that is not allowed. Of a backend that is not installed, or did not load, nothing is known: none are given,
    and whoever asks for it is told so.
    """
    if not words:
        return {}
    if backend is None:
        raise UsageError(f"--option: {quoted(words[0])} given without {argument}; options are one backend's: name it")
    declared = _declared(backend)
    if declared is None:
        return {}
    found: dict[str, Any] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator or not name:
            raise UsageError(f"--option: {quoted(word)} is not NAME=VALUE")
        if name not in declared:
            raise UsageError(
                f"--option: {quoted(name)} is not declared by {backend}; declared: {listed(sorted(declared))}"
                f"{did_you_mean(name, declared)}"
            )
        if name in found:
            raise UsageError(f"--option: {quoted(name)} is given twice; give one value")
        value = _value(declared[name], text)
        if (wrong := declared[name].problem(value)) is not None:
            raise UsageError(f"--option: {quoted(name)}: {quoted(text)} {wrong}{_meant(text, declared[name])}")
        found[name] = value
    return found


def _declared(backend: str) -> Mapping[str, Option] | None:
    """What the spec of a backend declares, in whatever variant; None where no spec of that name is there."""
    specs = [record.spec for record in registry().records if record.name == backend and record.spec is not None]
    if not specs:
        return None
    return {name: option for spec in specs for _, form in spec.by_variant for name, option in form.options.items()}


def _value(option: Option, text: str) -> Any:
    """``text`` as a value of the option's type; as it is where it is none, which is no allowed value then."""
    try:
        return _READERS[option.type](text)
    except ValueError:
        return text


def _meant(text: str, option: Option) -> str:
    return did_you_mean(text, map(str, option.choices))
