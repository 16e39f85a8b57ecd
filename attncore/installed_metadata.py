"""Metadata of installed distributions, of which no file is read that has no end or is far too long.

A distribution lies in a folder of the path, or in a zip file there: some kilobytes of one unpack to any number.
"""

from __future__ import annotations

import importlib.metadata
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

METADATA = ("METADATA", "PKG-INFO", "")
"""Files that a distribution's name and version are read from; the last is one that is all of its metadata."""
FILES = ("RECORD", "installed-files.txt", "SOURCES.txt", "top_level.txt")
"""Files that tell which files a distribution has."""
_MAX_BYTES = 1 << 24
"""Bytes of a file of metadata; those of large projects have some 10,000."""


def distribution(name: str, *files: str) -> importlib.metadata.Distribution:
    """The distribution, of which ``files`` may be read; PackageNotFoundError where it is not installed, else as of
    ``check_files``.
    """
    found = importlib.metadata.distribution(name)
    check_files(found, *files)
    return found


def installed_version(name: str) -> str:
    """The version of a distribution; an exception of any type where it is not installed, or cannot be read."""
    return distribution(name, *METADATA).version or ""


def check_files(found: importlib.metadata.Distribution, *names: str) -> None:
    """OSError for a file of its metadata that would be read without end: no regular one, or of more than 16 MiB."""
    place = place_of(found)
    for name in names if place is not None else ():
        length = _length(place, name) if isinstance(place, Path) else _unpacked_length(place, name)
        if length > _MAX_BYTES:
            raise OSError(f"{name or place.name} has more than {_MAX_BYTES} bytes")


def place_of(found: importlib.metadata.Distribution) -> Any:
    """The folder or the file of its metadata, a Path or, in a zip file, a ``zipfile.Path`` or importlib_metadata's own;
    None where it is of a finder that keeps something else.
    """
    try:
        place = getattr(found, "_path", None)
    except Exception:  # of a class of others
        return None
    return place if isinstance(place, Path) or isinstance(getattr(place, "root", None), zipfile.ZipFile) else None


def _length(place: Path, name: str) -> int:
    """The length of a file; 0 of one that is not read. OSError for one that is no regular file."""
    try:
        status = os.stat(os.path.join(place, name) if name else place)  # not below a file, where nothing is
    except OSError:  # it has no such file
        return 0
    if stat.S_ISDIR(status.st_mode):  # which is not read
        return 0
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{name or place.name} is no regular file")
    return status.st_size


def _unpacked_length(place: Any, name: str) -> int:
    """What a file of a zip file says that it unpacks to, beyond which it is not read; 0 where there is none."""
    try:
        return int(place.root.getinfo(place.joinpath(name).at if name else place.at).file_size)
    except KeyError:
        return 0
