"""Requirements such as ``acme-kernels>=2,<3``: parsed, and compared with what is installed.

A small part of PEP 440 and PEP 508, because attncore does not require ``packaging``: names, the six comparisons and
``~=``, ``==`` with ``.*``, versions with pre-, post- and development releases; local labels (``+cu130``) are ignored.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from functools import lru_cache
from typing import NamedTuple

from attncore.quoted import one_line, quoted

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(.*)")
_CLAUSE = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*([0-9][0-9A-Za-z.+!_-]*?(?:\.\*)?)\s*")
_VERSION = re.compile(
    r"v?(?:(\d+)!)?(\d+(?:\.\d+)*)(?:[._-]?(a|alpha|b|beta|c|rc|pre|preview)[._-]?(\d*))?"
    r"(?:[._-]?(?:post|rev|r)[._-]?(\d*)|-(\d+))?(?:[._-]?dev[._-]?(\d*))?(?:\+[a-z0-9._-]+)?"
)
_STAGES = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
Key = tuple[int, tuple[int, ...], tuple[int, int], int, tuple[int, int]]


class Requirement(NamedTuple):
    """A distribution's normalised name, and the comparisons its version must pass."""

    name: str
    clauses: tuple[tuple[str, str], ...]


def canonical_name(name: str) -> str:
    """A distribution's name as PEP 503 normalises it: ``Acme.Kernels_x`` is ``acme-kernels-x``."""
    return re.sub(r"[-_.]+", "-", name).lower()


@lru_cache(maxsize=1024)
def parse(text: str) -> Requirement:
    """A requirement from its text, its name normalised; ValueError where it is not one."""
    matched = _REQUIREMENT.fullmatch(text) if isinstance(text, str) else None
    clauses = []
    for part in matched.group(2).split(",") if matched and matched.group(2) else ():
        clause = _CLAUSE.fullmatch(part)
        if clause is None or not _makes_sense(*clause.groups()):
            matched = None
            break
        clauses.append((clause.group(1), clause.group(2)))
    if matched is None:
        raise ValueError(f"{quoted(text)} is not a requirement such as 'acme-kernels>=2,<3'")
    return Requirement(canonical_name(matched.group(1)), tuple(clauses))


def _makes_sense(operator: str, wanted: str) -> bool:
    if wanted.endswith(".*"):
        return operator in ("==", "!=") and re.fullmatch(r"\d+(\.\d+)*", wanted[:-2]) is not None
    if operator == "~=":
        return re.fullmatch(r"\d+(\.\d+)+", wanted) is not None
    return _VERSION.fullmatch(wanted.lower()) is not None


def satisfied(requirement: Requirement, version: str) -> bool:
    """Whether an installed ``version`` passes every comparison; an unreadable version passes none."""
    try:
        return all(_passes(operator, wanted, version) for operator, wanted in requirement.clauses)
    except ValueError:
        return False


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of ``names`` that are installed here."""
    return dict(_installed(names, tuple(sys.path)))


@lru_cache(maxsize=64)
def _installed(names: tuple[str, ...], path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in names:
        try:
            found.append((name, one_line(importlib.metadata.version(name) or "")))
        except Exception:  # not installed, or its metadata cannot be read
            continue
    return tuple(found)


@lru_cache(maxsize=1024)
def version_key(text: str) -> Key:
    """What two versions are compared by; ValueError where ``text`` is not a version."""
    matched = _VERSION.fullmatch(text.strip().lower())
    if matched is None:
        raise ValueError(f"{quoted(text)} is not a version")
    epoch, release, stage, stage_number, post, bare_post, dev = matched.groups()
    numbers = [int(part) for part in release.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    posted = post if post is not None else bare_post
    is_dev = dev is not None
    if stage is not None:
        pre = (_STAGES[stage], int(stage_number or 0))
    else:  # a development release of X comes before X's first alpha; X itself after all candidates
        pre = (-1, 0) if is_dev and posted is None else (3, 0)
    after = -1 if posted is None else int(posted or 0)
    return (int(epoch or 0), tuple(numbers), pre, after, (0, int(dev or 0)) if is_dev else (1, 0))


def _passes(operator: str, wanted: str, version: str) -> bool:
    if wanted.endswith(".*"):
        same = _starts_with(version, wanted[:-2])
        return same if operator == "==" else not same
    have, want = version_key(version), version_key(wanted)
    if operator == "~=":
        head = wanted.rpartition(".")[0]
        return have >= want and _starts_with(version, head)
    epoch, release, pre, post, dev = want
    if operator == ">" and dev[0]:  # 2.8.3.post2 is not later than 2.8.3 in the sense of a range
        return have >= (epoch, release, pre, post + 1, (0, 0)) if post >= 0 else have[:3] > want[:3]
    if operator == "<" and dev[0] and pre == (3, 0):  # nor is 3.0rc1 earlier than 3.0
        return have < (epoch, release, (-1, 0) if post < 0 else pre, post, (0, 0))
    if operator in "<>":
        return have < want if operator == "<" else have > want
    return {"==": have == want, "!=": have != want, ">=": have >= want, "<=": have <= want}[operator]


def _starts_with(version: str, head: str) -> bool:
    numbers, wanted = list(version_key(version)[1]), [int(part) for part in head.split(".")]
    numbers += [0] * (len(wanted) - len(numbers))
    return numbers[: len(wanted)] == wanted
