"""Runs the kit without a test file of the caller's: what ``python -m attncore.testing NAME`` does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from attncore.command import fail
from attncore.process_end import end_if_forked, exit_refused
from attncore.quoted import MAX_PART, add_note, notes, one_line, quoted
from attncore.temporary_folder import temporary_folder, write_temporary
from attncore.terminal import print_lines
from attncore.testing.harness.journal import Journal
from attncore.testing.harness.pytest_plugin import reports, row_of
from attncore.testing.harness.support_table import Report, identity

FILE = 'from attncore.testing.suite import *\n\nBACKEND = "{name}"\n'
_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
_runs = itertools.count(1)


def conformance(
    name: str, *, settings: str = "", options: Sequence[str] = ("-q",), journal: Journal | None = None,
    folder: Path | None = None,
) -> tuple[int, Report]:  # fmt: skip
    """Run the kit on backend ``name`` in this process; pytest's exit code, and what came of each test.

    Raises KeyboardInterrupt where it is interrupted.

    ``settings`` are further lines of the test file (``EXAMPLES = 200``), ``options`` go to pytest. Each test and what
    came of it is written to ``journal``, too. Files lie in ``folder``, or where temporary ones do.
    """
    catcher, installed = ReportCatcher(journal), identity(name)
    with temporary_folder("conformance", folder) as run_folder:
        # A name of its own: pytest imports a file only once a process, by its name.
        file = Path(run_folder, f"test_conformance_{re.sub('[^a-z0-9]', '_', name)}_{next(_runs)}.py")
        write_temporary(file, (FILE.format(name=name) + settings).encode())
        # Whatever pytest configuration lies around is its project's, not this run's.
        ini = Path(run_folder, "pytest.ini")
        write_temporary(ini, b"[pytest]\naddopts =\n")
        fixed = ["-c", str(ini), "--rootdir", run_folder, "--import-mode=importlib", "-p", "no:cacheprovider"]
        fixed += ["-p", "no:benchmark"]  # nothing is timed here, and it warns inside a worker of pytest-xdist
        try:
            os.getcwd()
        except OSError:  # it has been deleted, and pytest asks for it
            os.chdir(run_folder)
        code = _finished(name, run_folder, [*fixed, *options, str(file)], catcher)
    if catcher.interrupt is not None:
        if not notes(catcher.interrupt):
            add_note(catcher.interrupt, f"while {name} was tested")  # which may have raised it
        raise catcher.interrupt
    report = next(iter(catcher.found.values()), Report(name))  # of one file there is one table
    report.identity = installed
    return code, report


def _finished(name: str, folder: str, words: list[str], catcher: ReportCatcher) -> int:
    """pytest's exit code; 1 and a line where the backend has ended it.

    ``os._exit`` is a failure of the test that runs; in a thread of the backend's it ends the process with 1. A child
    that the backend forks ends with its test.
    """
    real, stream, process = os._exit, sys.stderr, os.getpid()

    def in_a_thread(status: int) -> NoReturn:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            print_lines(f"attncore: error: {name}: a thread ends the process with os._exit({quoted(status)})", stream)
            stream.flush()
        finally:
            real(1)

    os._exit = exit_refused(in_a_thread)
    try:
        with contextlib.redirect_stderr(stream), _without_variables():  # pytest leaves its own where it fails
            code = int(pytest.main(words, plugins=[catcher]))
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return fail(f"{name}: it has closed file descriptors of others, which pytest needs: {error}", 1)
    finally:
        end_if_forked(process)
        os._exit = real
    if catcher.uncollected:
        return fail(f"{name}: its tests cannot be collected: {catcher.uncollected}", 1)
    if code == 0 and catcher.left:
        return fail(f"{name}: the run has ended before {catcher.left} of its tests", 1)
    return code


@contextlib.contextmanager
def _without_variables() -> Iterator[None]:
    """Within it pytest is told nothing by the environment, as by no configuration that lies around."""
    found = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(found)


class ReportCatcher:
    """A pytest plugin that keeps the tables, by their titles, beyond the session."""

    found: dict[str, Report]
    interrupt: KeyboardInterrupt | None
    """What interrupted pytest, which ends without raising it."""

    left: int
    """The tests that were collected and have not ended."""

    uncollected: str
    """Why they cannot be collected; mostly empty."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.found, self.interrupt, self.left, self.uncollected = {}, None, 0, ""
        self._journal = journal
        self._process = os.getpid()
        self._session: pytest.Session | None = None
        self._unraisable = sys.unraisablehook

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        ours, pytests = self._unraisable, sys.unraisablehook

        def unraisable(told: sys.UnraisableHookArgs) -> None:
            """An interrupt that arrives in a callback, which pytest would make a warning of."""
            (ours if isinstance(told.exc_value, KeyboardInterrupt) else pytests)(told)

        sys.unraisablehook = unraisable

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.uncollected:
            self.uncollected = one_line(report.longreprtext.rstrip().rpartition("\n")[2], MAX_PART)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.left = len(session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        end_if_forked(self._process)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if self._journal is not None and (capability := row_of(item)) is not None:
            self._journal.running(item, capability)
            self._end_if_full()

    def pytest_runtest_logfinish(self) -> None:
        self.left -= 1
        if self._journal is not None and self._session is not None:
            for report in reports(self._session.config).values():  # of one file
                self._journal.results(report.results)
            self._end_if_full()

    def _end_if_full(self) -> None:
        if self._journal is not None and self._session is not None and self._journal.is_full:
            self._session.shouldstop = "no room for temporary files"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # and neither pytest.exit nor pytest's own, for what it cannot collect
        if isinstance(excinfo.value, KeyboardInterrupt) and not isinstance(excinfo.value, pytest.Session.Interrupted):
            self.interrupt = excinfo.value
            self._end_screen()

    def _end_screen(self) -> None:
        """What interrupts the run is one line, which the command prints: pytest's banner does not follow."""
        manager = self._session.config.pluginmanager if self._session is not None else None
        reporter = manager.get_plugin("terminalreporter") if manager is not None else None
        if manager is not None and reporter is not None:
            reporter.line("")  # after the dots
            reporter.flush()
            manager.unregister(reporter)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.found = reports(session.config)
