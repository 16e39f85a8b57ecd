"""What a library was found to lack when it was called, kept from one process to the next.

A build of flash-attn may leave features out (soft cap, ALiBi, windows, head sizes, a dtype), and says so only when it
is called. ``probe`` calls; the findings are kept, a JSON file for a library file, in ``$XDG_CACHE_HOME/attncore/flash``
(beside the verdicts of `attncore verify`), and are good for as long as that file is the same. The spec is made of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

DISTRIBUTIONS: Mapping[str, str] = {"2": "flash-attn", "4": "flash-attn-4"}
"""Generation -> the distribution that provides it."""


@dataclass(frozen=True)
class Record:
    """What calls of one generation's library showed on one device."""

    library: str
    """``flash-attn 2.8.3.post2``"""
    device: str
    """As the vendor calls it."""
    fails: str = ""
    """Why nothing of it runs; empty where something does."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Feature, ``dtype float16`` or ``head_size 96`` -> the library's words."""
    synchronises: bool = False
    """Whether its decode function waits for the device, as later versions of generation 2 do."""

    @property
    def head_sizes(self) -> frozenset[int]:
        """Sizes that the build leaves out."""
        return frozenset(int(name.partition(" ")[2]) for name in self.lacks if name.startswith("head_size "))

    def missing(self, kind: str) -> dict[str, str]:
        """What it lacks of a kind (``dtype``, ``head_size``), or with an empty one the features."""
        prefix = f"{kind} " if kind else ""
        named = ((name.removeprefix(prefix), text) for name, text in self.lacks.items() if name.startswith(prefix))
        return {name: text for name, text in named if kind or " " not in name}


def library(generation: str) -> str | None:
    """The generation's distribution with its version, None where it is not installed. Imports nothing."""
    try:
        return f"{DISTRIBUTIONS[generation]} {importlib.metadata.version(DISTRIBUTIONS[generation])}"
    except importlib.metadata.PackageNotFoundError:
        return None


def library_file(generation: str) -> Path | None:
    """The file whose change makes findings stale; None where it is not there. Imports nothing."""
    name = "flash_attn_2_cuda" if generation == "2" else "flash_attn"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if generation == "2":
        return Path(spec.origin) if spec.origin else None
    places = [Path(place, "cute", "interface.py") for place in spec.submodule_search_locations or ()]
    return next((place for place in places if place.exists()), None)


def read(generation: str) -> Record | None:
    """The findings on the library as it is installed now; None where there are none."""
    found, file = library(generation), _file(generation)
    if found is None or file is None:
        return None
    try:
        record = Record(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none there, or of another version of this plugin: probe again
        return None
    texts = isinstance(record.lacks, dict) and all(isinstance(text, str) for text in record.lacks.values())
    return record if texts and record.library == found else None


def write(generation: str, record: Record) -> None:
    """Keeps the findings. A folder that cannot be written to keeps none, and each process asks anew."""
    file = _file(generation)
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        partial.replace(file)
    except OSError:
        return


def forget(generation: str) -> None:
    """Drops the findings, so that the next creation calls the library again."""
    file = _file(generation)
    if file is not None:
        file.unlink(missing_ok=True)


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where findings are kept: under XDG_CACHE_HOME where that is an absolute path, else under ``~/.cache``.

    RuntimeError for a user without a home.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else Path.home() / ".cache", "attncore", "flash")


def _file(generation: str) -> Path | None:
    of_library = library_file(generation)
    if of_library is None:
        return None
    try:
        status, kept = of_library.stat(), folder()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    facts = f"{of_library.resolve()} {status.st_mtime_ns} {status.st_size}"
    return kept / f"generation{generation}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
