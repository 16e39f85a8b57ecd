"""Run the conformance kit on an installed backend and print its support table.

Exits with 0 where everything declared works, 1 where a test failed or the backend ended Python, 2 for bad usage, 3
where the backend is not installed or cannot run here; otherwise as the commands of attncore. A backend that crashes (a
segmentation fault, a signal) ends the process by that signal, without a table.
"""

from __future__ import annotations

import sys

from attncore.interrupts import as_program
from attncore.search_path import without_current_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    from attncore.command import Parser, run_command
    from attncore.testing.command import configure, run

    def command() -> int:
        parser = Parser(prog="python -m attncore.testing", description=__doc__)
        configure(parser)
        parser.usage = "%(prog)s [OPTION ...] NAME"  # as of attncore's commands: the options are listed below it
        try:
            args = parser.parse_args(argv)
        except SystemExit as ended:  # --help
            return int(ended.code or 0)
        return run(args)

    return run_command(command, to_the_end=argv is None)


def _load() -> Callable[[], int]:
    import attncore.testing.command  # noqa: F401  loaded while an interrupt needs no answer

    return main


if __name__ == "__main__":
    sys.path[:] = without_current_folder()
    raise SystemExit(as_program(_load))
