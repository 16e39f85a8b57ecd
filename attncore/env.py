"""The environment variables that attncore reads, each checked where it is read: a bad value is an error that names the
variable.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Literal, cast

VARIABLES: Mapping[str, str] = {
    "ATTNCORE_BACKEND": "name of the backend to use where the request names none",
    "ATTNCORE_PLUGINS": "comma-separated names of the only plugins that may load; empty: none",
    "ATTNCORE_DISABLE_PLUGINS": "comma-separated names of plugins that must not load",
    "ATTNCORE_STRICT_PLUGINS": "1: a plugin that fails raises instead of becoming a row in `attncore list`",
    "ATTNCORE_KERNELS": "cython or numba: the implementation of the hot path",
    "ATTNCORE_POISON": "1: released staging memory is filled with a pattern and late access raises",
    "ATTNCORE_REQUIRE_EXT": "1 (tests and builds): a missing compiled extension is an error",
    "ATTNCORE_DEBUG_EXT": "1 (builds): compile the extension with bounds checks",
    "ATTNCORE_PUBLIC_C_API": "1 (builds): read Python ints through the public C API only",
}
"""Every variable that attncore knows, with what it does."""

NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
"""What a backend's name looks like."""


def backend() -> str | None:
    """ATTNCORE_BACKEND: the name to use where the request names none; None when unset or empty."""
    value = os.environ.get("ATTNCORE_BACKEND", "").strip()
    if value and not NAME.fullmatch(value):
        raise ValueError(f"ATTNCORE_BACKEND: {value!r} is not a backend's name; `attncore list` prints them")
    return value or None


def plugins() -> frozenset[str] | None:
    """ATTNCORE_PLUGINS: the names that may load; None when unset (all may), empty when set to nothing (none may)."""
    value = os.environ.get("ATTNCORE_PLUGINS")
    return None if value is None else _names("ATTNCORE_PLUGINS", value)


def disabled_plugins() -> frozenset[str]:
    """ATTNCORE_DISABLE_PLUGINS: names that must not load; it wins over ATTNCORE_PLUGINS."""
    return _names("ATTNCORE_DISABLE_PLUGINS", os.environ.get("ATTNCORE_DISABLE_PLUGINS", ""))


def strict_plugins() -> bool:
    """ATTNCORE_STRICT_PLUGINS: whether a failing plugin raises instead of being recorded."""
    return _switch("ATTNCORE_STRICT_PLUGINS")


def kernels() -> Literal["cython", "numba"] | None:
    """ATTNCORE_KERNELS: the implementation asked for; None when unset or empty (compiled, where there is that)."""
    value = os.environ.get("ATTNCORE_KERNELS", "").strip()
    if value not in ("", "cython", "numba"):
        raise ValueError(f"ATTNCORE_KERNELS: {value!r} is neither cython nor numba")
    return cast('Literal["cython", "numba"]', value) if value else None


def poison() -> bool:
    """ATTNCORE_POISON: whether released staging memory is filled with a pattern."""
    return _switch("ATTNCORE_POISON")


def require_ext() -> bool:
    """ATTNCORE_REQUIRE_EXT: whether a missing compiled extension is an error."""
    return _switch("ATTNCORE_REQUIRE_EXT")


def problems() -> dict[str, str]:
    """Variables that are set to a bad value or that attncore does not know, each with the sentence that says so."""
    found = {}
    for read in (backend, plugins, disabled_plugins, strict_plugins, kernels, poison, require_ext):
        try:
            read()
        except ValueError as error:
            name, _, _ = str(error).partition(":")
            found[name] = str(error)
    for name in sorted(os.environ):
        if name.startswith("ATTNCORE_") and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            found[name] = f"{name}: attncore reads no such variable" + (f"; did you mean {close[0]}?" if close else "")
    return found


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: {value!r} is neither 0 nor 1")
    return value == "1"


def _names(variable: str, value: str) -> frozenset[str]:
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name and not NAME.fullmatch(name):
            raise ValueError(f"{variable}: {name!r} is not a plugin's name; it takes names separated by commas")
    return frozenset(name for name in names if name)
