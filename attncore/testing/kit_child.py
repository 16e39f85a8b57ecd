"""The process in which ``python -m attncore.testing`` runs the kit: ``... -m attncore.testing.kit_child FOLDER ...``.

What the command was given follows FOLDER, in which files of the run lie, the journal too: the first process prints the
table from it where this one crashes.
"""

from __future__ import annotations

import sys

from attncore.interrupts import as_program
from attncore.search_path import without_current_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
else:
    import _signal as signal  # as in attncore/interrupts.py

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
"""Signals that the first process starts this one without: while Python itself starts, they would be a traceback; a
Ctrl-Z before that would stop this one while the first one waits for its start, whatever arrives.
"""
JOURNAL = "journal"
"""The name of the journal in the folder."""


def main() -> int:
    """The exit code of the command."""
    from pathlib import Path

    from attncore.command import run_command
    from attncore.json_output import only_json
    from attncore.process_end import end_with_parent
    from attncore.testing.command import parsed, run
    from attncore.testing.harness.journal import FULL, Journal

    end_with_parent()
    folder = Path(sys.argv[1])
    journal = Journal(folder / JOURNAL)

    def command() -> int:
        args = parsed(sys.argv[2:], None)
        with only_json(args.json, to_the_end=True):
            return run(args, journal, folder)

    code = run_command(command, to_the_end=True)
    journal.end(code)
    return FULL if journal.is_full else code


def _load() -> Callable[[], int]:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    import attncore.testing.command  # noqa: F401  loaded while an interrupt needs no answer

    return main


if __name__ == "__main__":
    sys.path[:] = without_current_folder()
    raise SystemExit(as_program(_load))
