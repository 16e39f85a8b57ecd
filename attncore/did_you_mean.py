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


LEAST = 0.75
"""How much alike the letters of two words are, from 0 to 1: ``head`` and ``haed`` are as much."""


def meant_by(name: object, known: Iterable[str]) -> str | None:
    """As ``close_name``, but only where each word of ``name`` begins like that of the other and is spelt much like it.

    For names that may well be somebody else's, of which two often differ by a word: ``qk_nope_head_dim`` and
    ``qk_rope_head_dim``.
    """
    close = close_name(name, known)
    if close is None:
        return None
    words, others = str(name).split("_"), close.split("_")
    return close if len(words) == len(others) and all(map(_is_alike, words, others)) else None


def _is_alike(word: str, other: str) -> bool:
    import difflib

    return word[:1] == other[:1] and difflib.SequenceMatcher(None, word, other).ratio() >= LEAST


@lru_cache(maxsize=128)  # getattr(metadata, name, None) in every step must not compare names every time
def _closest(name: str, known: frozenset[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), None)
