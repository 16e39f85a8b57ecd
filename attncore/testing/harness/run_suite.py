"""Runs the kit without a test file of the caller's: what ``python -m attncore.testing NAME`` does."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from attncore.testing.harness.pytest_plugin import reports
from attncore.testing.harness.support_table import Report

FILE = 'from attncore.testing.suite import *\n\nBACKEND = "{name}"\n'
_runs = itertools.count(1)


def conformance(name: str, *, settings: str = "", options: Sequence[str] = ("-q",)) -> tuple[int, Report]:
    """Run the kit on backend ``name`` in this process; pytest's exit code, and what came of each test.

    Raises KeyboardInterrupt where it is interrupted.

    ``settings`` are further lines of the test file (``EXAMPLES = 200``), ``options`` go to pytest.
    """
    catcher = ReportCatcher()
    with tempfile.TemporaryDirectory(prefix="attncore-conformance-") as folder:
        # A name of its own: pytest imports a file only once a process, by its name.
        file = Path(folder, f"test_conformance_{re.sub('[^a-z0-9]', '_', name)}_{next(_runs)}.py")
        file.write_text(FILE.format(name=name) + settings, encoding="utf-8")
        # Whatever pytest configuration lies around is its project's, not this run's.
        ini = Path(folder, "pytest.ini")
        ini.write_text("[pytest]\naddopts =\n", encoding="utf-8")
        fixed = ["-c", str(ini), "--rootdir", folder, "--import-mode=importlib", "-p", "no:cacheprovider"]
        fixed += ["-p", "no:benchmark"]  # nothing is timed here, and it warns inside a worker of pytest-xdist
        try:
            os.getcwd()
        except OSError:  # it has been deleted, and pytest asks for it
            os.chdir(folder)
        code = int(pytest.main([*fixed, *options, str(file)], plugins=[catcher]))
    if catcher.interrupt is not None:
        raise catcher.interrupt
    return code, catcher.found.get(name, Report(name))


class ReportCatcher:
    """A pytest plugin that keeps the reports, by backend, beyond the session."""

    found: dict[str, Report]
    interrupt: KeyboardInterrupt | None
    """What interrupted pytest, which ends without raising it."""

    def __init__(self) -> None:
        self.found, self.interrupt = {}, None

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if isinstance(excinfo.value, KeyboardInterrupt):  # and not pytest.exit
            self.interrupt = excinfo.value

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.found = reports(session.config)
