"""The environment variables that attncore reads, each declared once and checked where it is read.

A bad value is a ValueError that begins with the variable's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, Literal, TypeVar, cast

from attncore.did_you_mean import did_you_mean
from attncore.quoted import quoted

NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
"""The form of a backend's name."""

Value = TypeVar("Value")


class Variable(Generic[Value]):
    """One variable: calling it gives the value of its text, which is None where the variable is unset."""

    def __init__(self, name: str, help: str, parse: Callable[[str, str | None], Value]) -> None:  # noqa: A002
        self.name, self.help, self._parse = name, help, parse

    def __call__(self) -> Value:
        return self._parse(self.name, os.environ.get(self.name))


def _backend_name(variable: str, text: str | None) -> str | None:
    name = (text or "").strip()
    if name and not NAME.fullmatch(name):
        raise ValueError(f"{variable}: {quoted(name)} is not a backend's name; `attncore list` prints them")
    return name or None


def _names(variable: str, text: str | None) -> frozenset[str]:
    names = [name.strip() for name in (text or "").split(",")]
    for name in names:
        if name and not NAME.fullmatch(name):
            raise ValueError(f"{variable}: {quoted(name)} is not a plugin's name; it takes names separated by commas")
    return frozenset(name for name in names if name)


def _names_or_none(variable: str, text: str | None) -> frozenset[str] | None:
    return None if text is None else _names(variable, text)


KERNELS = ("cython", "numba")


def _kernels_name(variable: str, text: str | None) -> Literal["cython", "numba"] | None:
    name = (text or "").strip()
    if name not in ("", *KERNELS):
        raise ValueError(f"{variable}: {quoted(name)} is neither cython nor numba{did_you_mean(name, KERNELS)}")
    return cast('Literal["cython", "numba"]', name) if name else None


def _switch(variable: str, text: str | None) -> bool:
    value = (text or "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: {quoted(value)} is neither 0 nor 1")
    return value == "1"


backend = Variable("ATTNCORE_BACKEND", "name of the backend to use where the request names none", _backend_name)
plugins = Variable(
    "ATTNCORE_PLUGINS", "comma-separated names of the only plugins that may load; empty: none", _names_or_none
)
disabled_plugins = Variable(
    "ATTNCORE_DISABLE_PLUGINS",
    "comma-separated names of plugins that must not load, also where ATTNCORE_PLUGINS names them",
    _names,
)
strict_plugins = Variable(
    "ATTNCORE_STRICT_PLUGINS", "1: a plugin that fails raises instead of becoming a row in `attncore list`", _switch
)
kernels = Variable("ATTNCORE_KERNELS", "cython or numba: the implementation of the hot path", _kernels_name)
poison = Variable(
    "ATTNCORE_POISON", "1: released staging memory is filled with a pattern and late access raises", _switch
)
require_ext = Variable("ATTNCORE_REQUIRE_EXT", "1 (tests): a missing compiled extension is an error", _switch)
no_ext = Variable("ATTNCORE_NO_EXT", "1 (builds): leave the extension out, for numba's kernels", _switch)
debug_ext = Variable("ATTNCORE_DEBUG_EXT", "1 (builds): compile the extension with bounds checks", _switch)
sanitize_ext = Variable("ATTNCORE_SANITIZE_EXT", "1 (builds): compile the extension with gcc's sanitizers", _switch)
public_c_api = Variable("ATTNCORE_PUBLIC_C_API", "1 (builds): read Python ints through the public C API only", _switch)

_DECLARED = tuple(value for value in globals().values() if isinstance(value, Variable))

VARIABLES: Mapping[str, str] = {variable.name: variable.help for variable in _DECLARED}
"""Every variable that attncore knows, with what it does."""


def variable_prefix(plugin: str) -> str:
    """What the names of a plugin's own variables begin with: ``ATTNCORE_ACME_``."""
    return f"ATTNCORE_{re.sub('[^a-z0-9]', '_', plugin).upper()}_"


def values(names: Iterable[str]) -> dict[str, str]:
    """Those of the variables ``names`` that are set, such as a plugin's own, with their texts."""
    return {name: os.environ[name] for name in names if name in os.environ}


def bad_values() -> dict[str, str]:
    """Variables of attncore that have a bad value, each with a sentence that says so."""
    found = {}
    for variable in _DECLARED:
        try:
            variable()
        except ValueError as error:
            found[variable.name] = str(error)
    return found


def problems(plugins: Mapping[str, Collection[str] | None] | None = None) -> dict[str, str]:
    """Variables that have a bad value or that nothing here reads, each with a sentence that says so.

    ``plugins`` has the variables that each plugin declares by the plugin's name, None where that is not known: any that
    begins with its prefix may then be its own.
    """
    found = bad_values()
    for name in sorted(os.environ):
        if name.startswith("ATTNCORE_") and name not in VARIABLES:
            owners = {one: known for one, known in (plugins or {}).items() if name.startswith(variable_prefix(one))}
            if not any(known is None or name in known for known in owners.values()):
                who = max(owners, key=len, default="attncore")
                known = (*VARIABLES, *(one for known in owners.values() for one in known or ()))
                found[name] = f"{name}: {who} reads no such variable{did_you_mean(name, known)}"
    return found
