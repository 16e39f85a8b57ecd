"""The saved runs of ``attncore bench``: a JSON file each, in a folder of the user's, apart by what must be the same.

They are kept under ``$XDG_STATE_HOME/attncore/bench/MACHINE/BACKEND-CONDITIONS/``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attncore.json_output import json_text
from attncore.kept_files import read_kept, write_kept
from attncore.testing.bench.machine import machine_name

FORMAT = 1
MAX_RUNS = 20
"""As many of the last runs are read."""
MAX_BYTES = 1 << 24
"""Bytes of a run that are read at most: one of 100 passes that were repeated, over saved steps, has some millions."""
CREDIBLE = 1e-12, 1e12
"""Seconds and ratios outside of this were not measured, and no quotient of two inside of it overflows."""


@dataclass(frozen=True)
class Row:
    """One part of one step: a figure for each pass, seconds and ratios."""

    step: str
    part: str
    median: list[float] = field(default_factory=list)
    q1: list[float] = field(default_factory=list)
    q3: list[float] = field(default_factory=list)
    to_yardstick: list[float] = field(default_factory=list)
    """The backend's time over the yardstick's: what a slow moment of the machine does not change."""
    to_reference: list[float] = field(default_factory=list)
    """The backend's time over the reference's; empty where there is no reference beside it."""


@dataclass(frozen=True)
class Run:
    """What ``attncore bench`` measured at one time."""

    backend: str
    machine: dict[str, str]
    time: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    config: dict[str, Any]
    steps: str
    """A digest of the file of saved steps; empty without one."""
    rows: list[Row]
    unsupported: dict[str, str]
    format: int = FORMAT

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)

    def folder(self, root: Path) -> Path:
        """Where runs of the same conditions are kept."""
        python = ".".join(self.versions.get("python", "").split(".")[:2])
        facts = json_text([self.config, self.steps, python, FORMAT], sort_keys=True)
        digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
        return root / machine_name(self.machine) / f"{self.backend}-{digest}"


def save(run: Run, root: Path) -> Path:
    """Write ``run`` beside those of the same conditions; OSError where that is not possible."""
    file = run.folder(root) / f"{run.time.replace(':', '')}.json"
    write_kept(file, json_text(run.as_json()).encode())
    return file


def load(like: Run, root: Path) -> tuple[list[Run], list[str]]:
    """The last runs of the same conditions as ``like``, the oldest first, and the names of files that are left out.

    A file is left out that is damaged, is not the user's own (``read_kept``), or whose figures are not credible; so is
    one that has no row, or the same row twice, which would count as another run.
    """
    try:
        files = sorted(like.folder(root).glob("[0-9]*.json"))[-MAX_RUNS:]
    except OSError:
        return [], []
    runs = {file.name: _read(file) for file in files}
    return [run for run in runs.values() if run is not None], [name for name, run in runs.items() if run is None]


def _read(file: Path) -> Run | None:
    try:
        found = json.loads(read_kept(file, MAX_BYTES))
        if found["format"] != FORMAT:
            return None
        rows = [Row(**row) for row in found.pop("rows")]
        run = Run(**found, rows=rows)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    lists = [getattr(row, name) for row in rows for name in ("median", "to_yardstick")]
    whole = all(isinstance(values, list) and values and all(is_figure(one) for one in values) for values in lists)
    paired = whole and all(len(row.median) == len(row.to_yardstick) for row in rows)
    texts = all(isinstance(one, str) for row in rows for one in (row.step, row.part))
    once = texts and len({(row.step, row.part) for row in rows}) == len(rows) > 0
    return run if paired and once and isinstance(run.time, str) else None


def is_figure(value: object) -> bool:
    """Whether ``value`` is a number of seconds or a ratio that can have been measured."""
    return isinstance(value, float) and CREDIBLE[0] <= value <= CREDIBLE[1]
