"""Run the conformance kit on an installed backend and print its support table.

Exits with 0 where everything declared works, 1 where a test failed or the backend ended Python, 2 for bad usage, 3
where the backend is not installed or cannot run here; otherwise as the commands of attncore. The kit runs in a process
of its own: where the backend crashes that (a segmentation fault, an abort), the table of the tests so far is printed,
the one that ran has failed, and the exit code is 1.
"""

from __future__ import annotations

import sys

from attncore.interrupts import as_program
from attncore.search_path import without_current_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code. What calls it with ``argv`` has the kit run in its own process."""
    from attncore.command import check_current_folder, run_command
    from attncore.json_output import only_json
    from attncore.testing.command import parsed, run
    from attncore.testing.run_apart import run_apart

    def command() -> int:
        try:
            args = parsed(argv, __doc__)
        except SystemExit as ended:  # --help
            return int(ended.code or 0)
        check_current_folder()
        if argv is None:
            return run_apart(args, sys.argv[1:])
        with only_json(args.json, to_the_end=False):
            return run(args)

    return run_command(command, to_the_end=argv is None)


def _load() -> Callable[[], int]:
    import attncore.testing.run_apart  # noqa: F401  loaded while an interrupt needs no answer

    return main


if __name__ == "__main__":
    sys.path[:] = without_current_folder()
    raise SystemExit(as_program(_load))
