"""The ``attncore`` command, also as ``python -m attncore``."""

from __future__ import annotations

import sys

from attncore.collector import pause
from attncore.interrupts import as_program
from attncore.search_path import without_current_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    """Run the command of this process's arguments; its exit code."""
    return as_program(_load)


def _load() -> Callable[[], int]:
    pause()  # until the module of the command is loaded, too
    from attncore.cli import main

    return main


if __name__ == "__main__":
    sys.path[:] = without_current_folder()  # a file of the current folder is none of the modules that are imported now
    raise SystemExit(main())
