"""Runs the kit in a process of its own, so that a backend that crashes it leaves a table all the same."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attncore.command import Terminated, fail
from attncore.json_output import print_json
from attncore.quoted import printable
from attncore.registry.child_process import how_it_ended
from attncore.temporary_folder import NoRoomError, temporary_folder
from attncore.testing.harness.journal import FULL, Noted, read_journal
from attncore.testing.harness.support_table import Result
from attncore.testing.kit_child import HELD, JOURNAL

_PATIENCE = 1.0
"""Seconds in which the other process is to end by itself once this one is interrupted: a terminal interrupts both."""


def run_apart(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the kit as ``words``, which ``args`` were read from, ask for it; the exit code.

    The other process prints what it finds. Where it has crashed, this one prints the table of what came before, of
    which the test that ran has failed, and the exit code is 1.
    """
    with temporary_folder("conformance") as folder:
        flag = "-I" if sys.flags.isolated else "-P"  # the current folder is not on the path
        code, sent = _waited_for([sys.executable, flag, "-m", "attncore.testing.kit_child", folder, *words])
        noted = read_journal(Path(folder, JOURNAL))
    if noted.ended is not None and noted.ended == code:
        return code
    if sent is not None:  # wherever that has met the other process: in a library's C++ code, it ends as if it crashed
        return 128 + sent
    if code == FULL:
        raise NoRoomError(f"the journal of the run in {folder}")
    return _crashed(args, noted, how_it_ended(code))


def _waited_for(words: Sequence[str]) -> tuple[int, int | None]:
    """The return code of a process that writes where this one does, and the last signal that ended the wait for it.

    A signal is handed on where the process does not end by itself, as it does where a terminal has interrupted both.
    The code may be 0 then, whatever it was: an interrupt comes between the system's answer and the note of it.
    """
    streams = {name: _descriptor(getattr(sys, name)) for name in ("stdout", "stderr")}
    found = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **streams)  # type: ignore[call-overload]
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, found)
        raise
    sent: int | None = None
    while True:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, found)
            return process.wait(), sent
        except KeyboardInterrupt as error:
            sent = error.code - 128 if isinstance(error, Terminated) else int(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
            if process.poll() is None:
                process.send_signal(sent)


def _descriptor(stream: Any) -> int | None:
    """The descriptor that a command's stream writes to; None where it has none."""
    try:
        return int(getattr(stream, "own", stream).fileno())
    except (OSError, ValueError, AttributeError):
        return None


def _crashed(args: argparse.Namespace, noted: Noted, how: str) -> int:
    """Print the table of a run that has crashed, and a line; 1."""
    report, running = noted.report, noted.running
    if report is None:
        return fail(f"{args.name}: {how} before its first test", 1)
    if noted.ended is not None:  # whose table is printed
        return fail(f"{args.name}: {how} after its last test", 1)
    where = "between two tests"
    if running is not None:
        where = f"in {running['running']}"
        reason = f"{how} in this test, and those after it were not run"
        report.add(Result(running["capability"], running["running"], "failed", reason))
    print(file=sys.stderr if args.json else sys.stdout)  # after the dots
    if args.json:
        print_json(report.as_json())
    else:
        print(printable(f"attncore conformance: {report.title}\n{report.text()}"))
    return fail(f"{args.name}: {how} {where}, test {len(noted.tests)} of the run; those after it were not run", 1)
