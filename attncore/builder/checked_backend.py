"""Whether what is given as a backend is one: a Choice, which makes backends, and a class of them are none."""

from __future__ import annotations

from typing import Any

from attncore.quoted import quoted


def check_backend(backend: Any) -> None:
    """TypeError where ``backend`` is no configured backend; it says what makes one."""
    if isinstance(backend, type):
        raise TypeError(
            f"backend: {backend.__name__} is a class, not a backend; attncore.select(...).create() makes one"
        )
    if hasattr(getattr(backend, "config", None), "block_size") and hasattr(backend, "from_host"):
        return
    if callable(getattr(backend, "create", None)):
        name = type(backend).__name__
        raise TypeError(f"backend: a {name} is not a backend; choice.create() makes one")
    raise TypeError(f"backend: {quoted(backend)} is not a backend; attncore.select(...).create() makes one")
