"""Folders that are there for as long as something runs."""

from __future__ import annotations

import tempfile
from pathlib import Path


def temporary_folder(name: str, within: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder for ``name``, which begins its name, in ``within`` or where temporary files lie; to be entered.

    OSError that says what to do where there can be none.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=f"attncore-{name}-", dir=within, ignore_cleanup_errors=True)
    except OSError as error:
        # Without the error's number, by which a command would take a full disk for that of its standard output.
        raise OSError(
            f"no temporary folder can be made: {error}; set TMPDIR to a folder that exists, may be written to and has "
            "room"
        ) from error
