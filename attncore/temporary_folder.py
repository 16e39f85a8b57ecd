"""Folders that are there for as long as something runs."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a limit that has no room left for what is written."""
_SET = "set TMPDIR to a folder that exists, may be written to and has room"


class NoRoomError(OSError):
    """There is no room for a temporary file; says what to do.

    Without an error's number, by which a command would take a full disk for that of its standard output.
    """

    def __init__(self, what: object) -> None:
        super().__init__(f"no room for {what}; {_SET}")


def temporary_folder(name: str, within: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder for ``name``, which begins its name, in ``within`` or where temporary files lie; to be entered.

    OSError that says what to do where there can be none.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=f"attncore-{name}-", dir=within, ignore_cleanup_errors=True)
    except OSError as error:
        # Without its number, as NoRoomError.
        raise OSError(f"no temporary folder can be made: {error}; {_SET}") from error


def write_temporary(file: Path, data: bytes, *, more: bool = False) -> None:
    """Write a file of a temporary folder, or with ``more`` behind what it has.

    NoRoomError where there is no room for it.
    """
    try:
        with file.open("ab" if more else "wb") as opened:
            opened.write(data)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise NoRoomError(file) from error


def check_room(file: Path) -> None:
    """NoRoomError where nothing more can be written to a file of a temporary folder.

    That another process, which was to write to it, has not done so is then no fault of the code that it ran.
    """
    if file.is_file():  # that process may have put a pipe in its place
        write_temporary(file, b"\n", more=True)
