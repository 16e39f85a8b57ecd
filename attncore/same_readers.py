"""Who may read what takes the place of a file or a folder: those who could read that, and no others.

A mode alone does not say so: its middle digit is of the group, and a new file has the group of the process, or of its
folder. Where there is a list of access (POSIX ACL), that digit is what the list's entries may do at most.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

_ACCESS = "system.posix_acl_access"


def same_readers(made: int | Path, before: Path) -> int:
    """Give ``made``, a descriptor or a folder that no other user may read yet, the group and the list of access of
    ``before``, which it is to replace; returns the mode to set then. Where it cannot have the group, its own may what
    others may; where it cannot have the list, none but the owner may anything.
    """
    found, mode = before.stat(), stat.S_IMODE(before.stat().st_mode)
    for owner in (found.st_uid, -1):  # only root may give a file away
        with suppress(OSError):
            os.chown(made, owner, found.st_gid)
            break
    if not _same_list(made, before):
        return mode & ~(stat.S_IRWXG | stat.S_IRWXO)
    if os.stat(made).st_gid != found.st_gid:
        return mode & ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    return mode


def _same_list(made: int | Path, before: Path) -> bool:
    """Whether both have the same list of access now, or none: a folder may give one to what is made in it."""
    wanted = _list_of(before)
    if _list_of(made) == wanted:
        return True
    if not hasattr(os, "setxattr"):  # only Linux has them so
        return False
    with suppress(OSError):
        if wanted is None:
            os.removexattr(made, _ACCESS)
        else:
            os.setxattr(made, _ACCESS, wanted)
        return True
    return False


def _list_of(place: Any) -> bytes | None:
    with suppress(OSError, AttributeError):  # it has none, or the system knows of none
        return os.getxattr(place, _ACCESS)
    return None
