"""When a build calls a backend's plan."""

from __future__ import annotations

from typing import Any

from attncore.abstract import AttentionBackend


def planner_of(backend: Any) -> Any:
    """The backend's ``plan``, or None where it is the default over a default: then a step calls nothing."""
    if backend is None:
        return None
    kind = type(backend)
    is_default = kind.plan is AttentionBackend.plan and kind.plan_layers is AttentionBackend.plan_layers
    return None if is_default else backend.plan
