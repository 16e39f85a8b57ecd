"""Whether a module is imported to its end, or another thread is still in the middle of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_LOCKS = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", None)
"""By name, of the modules that some thread imports, in CPython: few, where a process has thousands of modules."""


def is_half_imported(module: Any) -> bool:
    """Whether the module's code still runs, as Python's import notes it."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def half_imported(modules: Mapping[str, Any]) -> set[str]:
    """The names of those of ``modules`` that some thread is in the middle of importing."""
    names = list(modules if _LOCKS is None else _LOCKS)
    return {name for name in names if type(one := modules.get(name)) is ModuleType and is_half_imported(one)}
