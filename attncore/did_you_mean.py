"""The name that was meant where a name is misspelt: one rule for fields, features, backends, hooks and variables."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

LONGEST = 64
"""Letters of the longest name that is compared; comparing takes the square of it."""

OTHER_NAMES = {"fp16": "float16", "half": "float16", "fp32": "float32", "single": "float32"}
"""Names of the same thing that are not spelt alike."""


def close_name(name: object, known: Iterable[str]) -> str | None:
    """The one of ``known`` that is spelt most like ``name``; None where none is close, or it is one."""
    names = frozenset(known)
    if type(name) is str and OTHER_NAMES.get(name) in names - {name}:
        return OTHER_NAMES[name]
    if not isinstance(name, str) or len(name) > LONGEST or name in names:
        return None
    return _closest(name, names)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean slot_mapping?"``, the end of a sentence; empty where none of ``known`` is close."""
    close = close_name(name, known)
    return f"; did you mean {close}?" if close else ""


@lru_cache(maxsize=128)  # getattr(metadata, name, None) in every step must not compare names every time
def _closest(name: str, known: frozenset[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)
