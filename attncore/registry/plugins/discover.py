"""Finding plugins: the entry points of the group ``attncore.backends``, read from metadata. Imports no plugin."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from attncore import env
from attncore.registry.package_requirements import canonical_name
from attncore.registry.plugins.known_backends import KNOWN
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason

GROUP = "attncore.backends"
logger = logging.getLogger(__name__)


def find() -> list[PluginRecord]:
    """Every entry point of the group, sorted by (name, distribution): found, blocked, duplicate or broken.

    A distribution whose entry points cannot be parsed is broken under each name that its text shows, else under ``?``.
    One that is on the path twice counts where it is met first, as for imports.
    """
    records = sorted(_entry_points(), key=lambda record: (record.name, record.distribution))
    return _without_duplicates(_without_blocked(_without_misnamed(records)))


def _entry_points() -> Iterator[PluginRecord]:
    seen = set()
    for distribution in importlib.metadata.distributions():
        try:
            # most distributions have no such entry point; searching the text is cheaper than parsing the file
            text = distribution.read_text("entry_points.txt")
            if not text or GROUP not in text:
                continue
            points = [point for point in distribution.entry_points if point.group == GROUP]
            failure = None
        except Exception as error:
            points, failure = [], error
        if failure is None and not points:
            continue
        name, version = _distribution_name(distribution), _distribution_version(distribution)
        records = [PluginRecord(point.name, name, version, "found", entry_point=point) for point in points]
        if failure is not None:
            records = _unreadable(distribution, name, version, failure)
        if not records or (key := canonical_name(name)) in seen:
            continue
        seen.add(key)
        yield from records


def _unreadable(
    distribution: importlib.metadata.Distribution, name: str, version: str, error: Exception
) -> list[PluginRecord]:
    """Broken records of a distribution whose entry points cannot be parsed; none where the text lacks the group."""
    place = getattr(distribution, "_path", None)
    try:
        text = (place / "entry_points.txt").read_bytes().decode(errors="replace") if place is not None else ""
    except OSError:
        text = ""
    if GROUP not in text:
        logger.warning("%s is skipped, its metadata is unreadable: %s: %s", name, type(error).__name__, error)
        return []
    section = text.partition(f"[{GROUP}]")[2].partition("\n[")[0]
    names = dict.fromkeys(re.findall(rf"(?m)^[ \t]*({env.NAME.pattern})[ \t]*=", section)) or {"?": None}
    label = " ".join(part for part in (name, version) if part)
    reason = Reason(
        "broken",
        f"entry_points.txt of {label} cannot be read: {type(error).__name__}: {error}",
        asked=getattr(place, "name", None),
        source=label,
        fix=f"reinstall {name}, or report it to its authors",
    )
    return [PluginRecord(one, name, version, "broken", reasons=(reason,), error=error) for one in names]


def _distribution_name(distribution: importlib.metadata.Distribution) -> str:
    try:
        name = distribution.metadata["Name"]
    except Exception:
        name = None
    if isinstance(name, str) and name.strip():
        return name.strip()
    path = getattr(distribution, "_path", None)  # without METADATA the folder's name is left
    return str(getattr(path, "name", "unnamed")).partition(".dist-info")[0].partition("-")[0]


def _distribution_version(distribution: importlib.metadata.Distribution) -> str:
    try:
        return str(distribution.version or "")
    except Exception:
        return ""


def _without_misnamed(records: list[PluginRecord]) -> list[PluginRecord]:
    """The records, broken where the entry point's name is no backend's name."""

    def checked(record: PluginRecord) -> PluginRecord:
        if record.state != "found" or env.NAME.fullmatch(record.name):
            return record
        reason = Reason(
            "broken",
            f"entry point {record.name!r} of {record.label} is not a backend's name",
            asked=record.name,
            accepted=env.NAME.pattern,
            source=record.label,
            fix="rename the entry point: lower-case letters, digits, '-', '_' and '.'",
        )
        return replace(record, state="broken", reasons=(reason,))

    return [checked(record) for record in records]


def _without_blocked(records: list[PluginRecord]) -> list[PluginRecord]:
    """The records, blocked where the environment keeps them from loading."""
    allowed, disabled = env.plugins(), env.disabled_plugins()

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
        else:
            return record
        reason = Reason("blocked", message, asked=record.name, accepted=accepted, source=variable, fix=fix)
        return replace(record, state="blocked", reasons=(reason,))

    return [checked(record) for record in records]


def _without_duplicates(records: list[PluginRecord]) -> list[PluginRecord]:
    """A name of KNOWN belongs to its distribution; every claimant of another name that is claimed twice is refused."""
    claims = Counter(record.name for record in records if record.state == "found")

    def checked(record: PluginRecord) -> PluginRecord:
        if record.state != "found":
            return record
        known = KNOWN.get(record.name)
        if known is not None and canonical_name(record.distribution) == known.distribution and _claims_of(record) == 1:
            return record
        if known is None and claims[record.name] == 1:
            return record
        if known is not None:
            message = f"{record.label} claims the name {record.name!r}, which belongs to {known.distribution}"
            accepted, fix = [known.distribution], f"pip uninstall {record.distribution}, or have it renamed"
        else:
            others = [one.label for one in records if one.name == record.name and one is not record]
            accepted = None
            message = f"{record.label} claims the name {record.name!r}, and so does {', '.join(others)}"
            fix = "uninstall one of them"
        reason = Reason("duplicate", message, asked=record.name, accepted=accepted, source="attncore", fix=fix)
        return replace(record, state="duplicate", reasons=(reason,))

    def _claims_of(record: PluginRecord) -> int:
        return sum(one.name == record.name and one.distribution == record.distribution for one in records)

    return [checked(record) for record in records]
