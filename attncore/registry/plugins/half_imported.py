"""Whether a module is imported to its end, or another thread is still in the middle of it."""

from __future__ import annotations

from typing import Any


def is_half_imported(module: Any) -> bool:
    """Whether the module's code still runs, as Python's import notes it."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
