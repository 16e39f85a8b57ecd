"""Requirements such as ``acme-kernels>=2,<3``: read by ``packaging``, and compared with what is installed.

``packaging`` is loaded where the first of them is read, not with this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from attncore.installed_metadata import installed_version
from attncore.quoted import MOST, one_line, quoted

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_NAME = re.compile("[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
"""What PEP 508 allows as the name of a distribution."""


def canonical_name(name: str) -> str:
    """A distribution's name as PEP 503 normalises it: ``Acme.Kernels_x`` is ``acme-kernels-x``."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)


def name_and_version(text: str) -> tuple[str, str]:
    """``NAME==VERSION`` as a normalised name and a version, which may be empty; ValueError for another text."""
    from packaging.version import InvalidVersion, Version

    name, separator, version = (part.strip() for part in text.partition("=="))
    try:
        if not separator or not _NAME.fullmatch(name):
            raise InvalidVersion
        if version:
            Version(version)
    except InvalidVersion:
        raise ValueError(f"{quoted(text)} is not NAME==VERSION") from None
    return canonical_name(name), version


@lru_cache(maxsize=1024)
def parse(text: str) -> Requirement:
    """A requirement from its text, its name normalised; ValueError where it is not one."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(text)
    except (InvalidRequirement, TypeError, AttributeError):  # of another type than str
        raise ValueError(f"{quoted(text)} is not a requirement such as 'acme-kernels>=2,<3'") from None
    found.name = canonical_name(found.name)
    return found


@lru_cache(maxsize=1024)
def satisfied(text: str, version: str) -> bool:
    """Whether an installed ``version`` passes every comparison, also a pre-release; an unreadable one passes none."""
    from packaging.version import InvalidVersion

    specifier = parse(text).specifier
    try:
        return not specifier or specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def needed(texts: Iterable[str]) -> list[str]:
    """Those of ``texts`` that count in this environment: without a marker, or with one that holds here. One for each
    distribution, so that what says how to install it names it once.

    ValueError where a marker cannot be evaluated, such as ``os_name ~= 'posix'``, or here only: a kernel's version may
    be none that versions are compared with.
    """
    by_name: dict[str, list[str]] = {}
    for text in texts:
        if _holds(text):
            by_name.setdefault(parse(text).name, []).append(text)
    return [text for same in by_name.values() for text in _as_one(tuple(dict.fromkeys(same)))]


def _as_one(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Requirements of one distribution as one that accepts what all accept; as they are where one names an address."""
    found = [parse(text) for text in texts]
    if len(texts) == 1 or any(one.url for one in found):
        return texts
    extras = ",".join(sorted({extra for one in found for extra in one.extras}))
    versions = ",".join(dict.fromkeys(str(one.specifier) for one in found if one.specifier))
    return (f"{found[0].name}{f'[{extras}]' if extras else ''}{versions}",)


@lru_cache(maxsize=1024)
def _holds(text: str) -> bool:
    marker = parse(text).marker
    try:
        return marker is None or marker.evaluate()
    except Exception as error:
        raise ValueError(f"{quoted(text)}: its marker cannot be evaluated here: {one_line(error, MOST)}") from None


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of ``names`` that are installed here."""
    return dict(_installed(names, tuple(sys.path)))


@lru_cache(maxsize=64)
def _installed(names: tuple[str, ...], path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in names:
        try:
            found.append((name, one_line(installed_version(name))))
        except Exception:  # not installed, or its metadata cannot be read
            continue
    return tuple(found)
