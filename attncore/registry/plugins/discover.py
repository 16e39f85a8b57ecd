"""Finding plugins: the entry points of the group ``attncore.backends``, read from metadata. Imports no plugin."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from attncore import env
from attncore.did_you_mean import close_name
from attncore.installed_metadata import METADATA, check_files, place_of
from attncore.logged import logged
from attncore.quoted import describe_error, listed, one_line, quoted, type_name
from attncore.registry.package_requirements import canonical_name
from attncore.registry.plugins.known_backends import KNOWN
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.spec.plain_values import MAX_ENTRIES

GROUP = "attncore.backends"
OURS = ("attncore", "reference", "attncore.reference")
"""Our own distribution, the name and the value of its one entry point."""
_VALUE = re.compile(r"[A-Za-z_]\w*(\.\w+)*(\s*:\s*\w+(\.\w+)*)?\s*(\[.*\])?")
_LETTERS, _RIVALS = 200, 5
"""Letters of a name or a version, and claimants of a name, beyond which the rest is left out."""
logger = logging.getLogger(__name__)


def find() -> list[PluginRecord]:
    """Every entry point of the group, sorted by (name, distribution): found, blocked, duplicate or broken.

    A distribution whose entry points cannot be parsed is broken under each name that its text shows, else under ``?``.
    One that is in two folders of the path counts where it is met first, as for imports; names that only the other has
    are disputed. So is one that is twice in one folder, and a name that two distributions claim.
    """
    records = sorted(_entry_points(), key=lambda record: (record.name, record.distribution))
    return _without_duplicates(_without_blocked(_without_misnamed(records)))


def _entry_points() -> Iterable[PluginRecord]:
    installed: dict[str, list[_Installed]] = {}
    foreign: list[PluginRecord] = []
    for distribution in _distributions():
        try:
            check_files(distribution, "entry_points.txt")
            # most distributions have no such entry point; searching the text is cheaper than parsing the file
            text = distribution.read_text("entry_points.txt")
            if not text or GROUP not in text:
                continue
            # the same line twice is one entry point; another value for the same name is a dispute
            points = {(point.name, point.value): point for point in distribution.entry_points if point.group == GROUP}
            failure = _refused(points)
        except Exception as error:
            points, failure = {}, error
        if failure is None and not points:
            continue
        name, version = _name_and_version(distribution)
        records = [
            PluginRecord(one_line(point.name, _LETTERS), name, version, "found", entry_point=point)
            for point in points.values()
        ]
        if failure is not None:
            records = _unreadable(distribution, name, version, failure)
        place = place_of(distribution)
        if canonical_name(name) == OURS[0] and set(points) != {OURS[1:]}:
            foreign.extend(_foreign(record, place) for record in records)
        elif records:
            installed.setdefault(canonical_name(name), []).append(_Installed(place, records))
    return foreign + [record for copies in installed.values() for record in _of_first_folder(copies)]


def _refused(points: Collection[tuple[object, object]]) -> Exception | None:
    """Why entry points, by name and value, are not taken: each would be imported by every command."""
    if len(points) > MAX_ENTRIES:
        return ValueError(f"{len(points)} entry points of {GROUP}; at most {MAX_ENTRIES} are taken")
    if not all(isinstance(text, str) for point in points for text in point):  # of a finder's own
        return TypeError(f"an entry point of {GROUP} whose name or value is no text")
    return None


def _distributions() -> Iterable[importlib.metadata.Distribution]:
    """What ``importlib.metadata.distributions`` gives, but for a finder that fails, which ends none but itself."""
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_distributions", None)
        try:
            yield from find(importlib.metadata.DistributionFinder.Context()) if find is not None else ()
        except Exception as error:
            words = "distributions of %s in sys.meta_path cannot be listed: %s"
            logged(logger, logging.WARNING, words, type_name(finder), describe_error(error))


class _Installed(NamedTuple):
    """The plugins of one distribution, and the folder of its metadata, None where it is not one."""

    place: Path | None
    records: list[PluginRecord]

    @property
    def folder(self) -> Path | None:
        """The folder of the path that it is installed in."""
        return self.place.parent if self.place is not None else None


def _of_first_folder(copies: list[_Installed]) -> list[PluginRecord]:
    """The records of a distribution's first copy on the path, disputed where a second one is beside it; and those of
    names that only copies in other folders have, which cannot be loaded.
    """
    first = copies[0]
    given = {record.name for record in first.records}
    hidden = [
        _disputed(
            record,
            f"{record.label} in {one.folder} is hidden by {first.records[0].label} in {first.folder}, which comes "
            f"first on the path and has no {record.name!r}",
            f"pip uninstall {record.distribution} until none is left, then install the one that is meant",
        )
        for one in copies[1:]
        for record in one.records
        if one.folder != first.folder and record.name not in given
    ]
    beside = [one for one in copies[1:] if one.place != first.place and one.folder == first.folder]
    if not beside:
        return first.records + hidden
    records = [record for one in (first, *beside) for record in one.records]
    labels = listed(dict.fromkeys(record.label for record in records))
    return hidden + [
        _disputed(
            record,
            f"{record.distribution} is installed {1 + len(beside)} times in {first.folder}: {labels}",
            f"pip uninstall {record.distribution} until none is left, then install it once",
        )
        for record in records
    ]


def _disputed(record: PluginRecord, message: str, fix: str, accepted: list[str] | None = None) -> PluginRecord:
    reason = Reason("duplicate", message, asked=record.name, accepted=accepted, source="attncore", fix=fix)
    return replace(record, state="duplicate", reasons=(reason,))


def _foreign(record: PluginRecord, place: Path | None) -> PluginRecord:
    """Of a distribution that is called as ours is and has other entry points: first on the path it would hide ours."""
    message = f"{record.label} in {place} is not the attncore that is running, and has its name"
    return _disputed(record, message, f"remove {place}", [OURS[1]])


def _unreadable(
    distribution: importlib.metadata.Distribution, name: str, version: str, error: Exception
) -> list[PluginRecord]:
    """Broken records of a distribution whose entry points cannot be parsed; none where the text lacks the group."""
    place = place_of(distribution)
    try:
        check_files(distribution, "entry_points.txt")
        text = (place / "entry_points.txt").read_bytes().decode(errors="replace") if place is not None else ""
    except Exception:  # a damaged zip file has errors of several libraries
        text = ""
    if GROUP not in text:
        words = "%s is skipped, its metadata is unreadable: %s"
        logged(logger, logging.WARNING, words, name, describe_error(error))
        return []
    why = _no_entry_point(text) or describe_error(error)
    section = text.partition(f"[{GROUP}]")[2].partition("\n[")[0]
    names = dict.fromkeys(re.findall(rf"(?m)^[ \t]*({env.NAME.pattern})[ \t]*=", section)) or {"?": None}
    names = dict.fromkeys(islice(names, MAX_ENTRIES))
    label = " ".join(part for part in (name, version) if part)
    reason = Reason(
        "broken",
        f"entry_points.txt of {label} cannot be read: {why}",
        asked=getattr(place, "name", None),
        source=label,
        fix=f"reinstall {name}, or report it to its authors",
    )
    return [PluginRecord(one, name, version, "broken", reasons=(reason,), error=error) for one in names]


def _no_entry_point(text: str) -> str | None:
    """Which line is no entry point, in words; None where each is one. What importlib says of it names no line."""
    in_section = False
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line.startswith("[") and line.endswith("]"):
            in_section = True
        elif in_section and line and not line.startswith("#") and "=" not in line:
            return f"line {number}, {quoted(line)}, is not of the form NAME = MODULE"
    return None


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Of its metadata, which is read once; an empty version where there is none."""
    try:
        check_files(distribution, *METADATA)
        metadata = distribution.metadata
    except Exception:
        metadata = None
    name, version = _line(metadata, "Name"), _line(metadata, "Version")
    if name:
        return name, version
    path = place_of(distribution)  # without METADATA the folder's name is left
    return one_line(
        str(getattr(path, "name", "unnamed")).partition(".dist-info")[0].partition("-")[0], _LETTERS
    ), version


def _line(metadata: Any, name: str) -> str:
    """What a line of metadata says; empty where it has none."""
    try:
        value = metadata[name]
    except Exception:
        return ""
    return one_line(value, _LETTERS) if isinstance(value, str) else ""


def _without_misnamed(records: list[PluginRecord]) -> list[PluginRecord]:
    """The records, broken where the entry point's name is no backend's name, or its value names no module."""

    def checked(record: PluginRecord) -> PluginRecord:
        point = record.entry_point
        if record.state != "found" or point is None:
            return record
        if not env.NAME.fullmatch(point.name):
            message = f"entry point {record.name!r} of {record.label} is not a backend's name"
            asked, accepted = record.name, env.NAME.pattern
            fix = "rename the entry point: lower-case letters, digits, '-', '_' and '.'"
        elif not _VALUE.fullmatch(point.value):
            message = f"entry point {record.name!r} of {record.label} names no module: {quoted(point.value)}"
            asked, accepted = one_line(point.value), _VALUE.pattern
            fix = f"reinstall {record.distribution}, or report it to its authors"
        else:
            return record
        reason = Reason("broken", message, asked=asked, accepted=accepted, source=record.label, fix=fix)
        return replace(record, state="broken", reasons=(reason,))

    return [checked(record) for record in records]


def _without_blocked(records: list[PluginRecord]) -> list[PluginRecord]:
    """The records, blocked where the environment keeps them from loading."""
    allowed, disabled = env.plugins(), env.disabled_plugins()
    installed = {record.name for record in records}

    def checked(record: PluginRecord) -> PluginRecord:
        if record.state != "found":
            return record
        if record.name in disabled:
            variable, fix = "ATTNCORE_DISABLE_PLUGINS", f"take {record.name} out of ATTNCORE_DISABLE_PLUGINS"
            message, accepted = f"blocked by {variable}, which names it", None
        elif allowed is not None and record.name not in allowed:
            variable, fix = "ATTNCORE_PLUGINS", f"add {record.name} to ATTNCORE_PLUGINS"
            accepted = sorted(allowed)
            message = f"blocked by {variable}, which allows only: {', '.join(accepted) or 'none'}"
            meant = [one for one in accepted if one not in installed and close_name(one, installed) == record.name]
            if meant:
                message, fix = f"{message}; no backend is named {quoted(meant[0])}", f"write {record.name} there"
        else:
            return record
        reason = Reason("blocked", message, asked=record.name, accepted=accepted, source=variable, fix=fix)
        return replace(record, state="blocked", reasons=(reason,))

    return [checked(record) for record in records]


def _without_duplicates(records: list[PluginRecord]) -> list[PluginRecord]:
    """A name of KNOWN belongs to its distribution; every claimant of another name that is claimed twice is refused.

    So is a distribution that gives one name to two modules.
    """
    claims: dict[str, list[PluginRecord]] = {}
    gives = Counter((record.name, record.distribution) for record in records if record.state == "found")
    for record in records:
        if record.state == "found":
            claims.setdefault(record.name, []).append(record)

    def checked(record: PluginRecord) -> PluginRecord:
        if record.state != "found":
            return record
        known = KNOWN.get(record.name)
        others = [one for one in claims[record.name][: _RIVALS + 1] if one is not record]
        if known is not None and canonical_name(record.distribution) != known.distribution:
            message = f"{record.label} claims the name {record.name!r}, which belongs to {known.distribution}"
            fix = f"pip uninstall {record.distribution}, or have it renamed"
            return _disputed(record, message, fix, [known.distribution])
        if gives[record.name, record.distribution] > 1:
            message = f"{record.label} gives the name {record.name!r} to more than one module"
            return _disputed(record, message, f"update {record.distribution}, or report it to its authors")
        if known is None and others:
            message = (
                f"{record.label} claims the name {record.name!r}, and so does {listed(one.label for one in others)}"
            )
            return _disputed(record, message, "uninstall one of them")
        return record

    return [checked(record) for record in records]
