"""Files that a program keeps for its next run in a folder such as ``~/.cache``: written whole, read with suspicion.

Such a folder may be one that others write to. What is read is a regular file of this user (or of root), which no other
user may write to, and not a long one; all else is an error, before a byte of it is read. A file that its group may
write to is refused too, also where the group has no other member: who is in a group is not asked.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from attncore.show import counted

MAX_BYTES = 1 << 20
"""Bytes of a kept file that are read at most, unless the reader says otherwise."""


def cache_folder(name: str) -> Path:
    """``attncore/name`` in the user's folder of caches: XDG_CACHE_HOME, else the platform's, such as ``~/.cache``.

    RuntimeError for a user without a home.
    """
    from platformdirs import user_cache_path

    return _absolute(user_cache_path("attncore", appauthor=False)) / name


def state_folder(name: str) -> Path:
    """``attncore/name`` in the user's folder of what programs record: XDG_STATE_HOME, else such as ``~/.local/state``.

    RuntimeError for a user without a home.
    """
    from platformdirs import user_state_path

    return _absolute(user_state_path("attncore", appauthor=False)) / name


def _absolute(folder: Path) -> Path:
    if not folder.is_absolute():  # "~" where there is no home; it would be a folder of the current one
        raise RuntimeError(f"{folder} is no absolute path: the user has no home")
    return folder


def read_kept(file: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a kept file. FileNotFoundError where there is none.

    OSError, which names the file and says why, where it is no regular file, belongs to another user, may be written to
    by its group or by every user, or has more than ``most`` bytes. Does not wait, whatever stands in the file's place.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe is opened without a writer
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{file} is no regular file")
        _check_owner(file, status)
        with open(descriptor, "rb", closefd=False) as opened:
            data = opened.read(most + 1)
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise OSError(f"{file} has more than {counted(most, 'byte')}")
    return data


def check_folder(folder: Path) -> None:
    """OSError, which names the folder and says why, where others may put files of this user into it or swap them."""
    _check_owner(folder, folder.stat())


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise OSError(f"{path} belongs to another user ({status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "every user" if status.st_mode & stat.S_IWOTH else "its group"
        raise OSError(f"{path} may be written to by {who}; chmod go-w makes it your own")


def write_kept(file: Path, data: bytes) -> None:
    """Write a kept file, all of it or nothing, for this user alone; makes its folder. OSError where it cannot be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(data)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
