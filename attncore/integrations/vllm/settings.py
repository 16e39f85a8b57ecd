"""What a user of vLLM says to attncore: ``additional_config={"attncore": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attncore.did_you_mean import did_you_mean
from attncore.quoted import listed, quoted

FIELDS = ("options", "prefer", "exclude", "policy", "allow_compile")
"""Fields of an AttentionRequest that the user may set. ``prefer``, ``exclude`` and ``policy`` matter for CUSTOM."""
_WHERE = "additional_config['attncore']"


def settings_of(vllm_config: Any) -> dict[str, Any]:
    """The user's fields of the request; ValueError or TypeError for what is none. Their values the request checks."""
    given = getattr(vllm_config, "additional_config", None)
    if not isinstance(given, Mapping) or given.get("attncore") is None:
        return {}
    given = given["attncore"]
    if not isinstance(given, Mapping):
        raise TypeError(f"{_WHERE}: {quoted(given)} is not a mapping; give fields of it: {', '.join(FIELDS)}")
    for name in given:
        if name not in FIELDS:
            raise ValueError(f"{_WHERE}: {quoted(name)} is not one of {', '.join(FIELDS)}{did_you_mean(name, FIELDS)}")
    _check_backends(given.get("options"))
    return dict(given)


def _check_backends(options: Any) -> None:
    """ValueError for options of a backend that no plugin provides; what is no mapping the request refuses."""
    from attncore.registry.plugins.discover import find
    from attncore.registry.plugins.known_backends import KNOWN

    if not isinstance(options, Mapping) or not options:
        return
    known = sorted({*KNOWN, *(record.name for record in find())})
    for name in options:
        if name not in known:
            raise ValueError(
                f"{_WHERE}['options']: {quoted(name)} is no backend; known: {listed(known)}{did_you_mean(name, known)}"
            )
