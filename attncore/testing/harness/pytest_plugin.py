"""The kit's part of pytest: unsupported is a skip with its reason, expected failures are strict, the table is printed.

The suite's star import brings it along as ``pytest_plugins``; nothing happens to tests that are not the kit's.

It may be imported before pytest knows of it: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import traceback
import unittest
from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch

from attncore.standard_output import lent_streams
from attncore.testing.harness.errors import (
    ConformanceError,
    NothingToRefuseError,
    NotRunError,
    UnsupportedError,
    text_of,
    told,
)
from attncore.testing.harness.failures import shown
from attncore.testing.harness.support_table import Report, Result

NOT_RUN, NOTHING = "not run: ", "nothing to check: "
_OUTCOMES = (pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception, unittest.SkipTest)
"""What pytest takes for no failure, whoever raises it."""
_REPORTS = pytest.StashKey[dict[str, Report]]()
_ROW = pytest.StashKey[tuple[Report, str]]()
"""Of a test: an empty table like the one that it belongs to, and its row there."""
_BROKEN = pytest.StashKey[dict[Any, str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Registered late, while a test file is collected; the marker is then known before it is used."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.stash[_REPORTS] = {}
    config.stash[_BROKEN] = {}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a test of the kit its row in the table, its marker, and its expected failure."""
    function = getattr(item, "function", None)
    capability = getattr(function, "attncore_capability", None)
    if capability is None:
        return
    module = getattr(item, "module", None)
    options = getattr(module, "OPTIONS", None)
    device = getattr(module, "DEVICE", None)
    table = Report(
        str(getattr(module, "BACKEND", "?")),
        dict(options) if isinstance(options, Mapping) else {},
        None if device is None else str(device),
        use_mla=getattr(module, "USE_MLA", False) is True,
    )
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    item.stash[_ROW] = (table, capability.format(**parameters))
    if getattr(function, "attncore_gpu", False):
        item.add_marker(pytest.mark.gpu)
    for name, reason in _expected_failures(item).items():
        if name in (item.name, item.name.partition("[")[0]):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _expected_failures(item: pytest.Item) -> dict[str, str]:
    return dict(getattr(getattr(item, "module", None), "EXPECTED_FAILURES", {}))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that others build on come first in their file. An expected failure that names no test of its file is an
    error: it excuses nothing.
    """
    _basis_first(items)
    names: dict[Any, set[str]] = {}
    for item in items:
        if _ROW in item.stash:
            names.setdefault(item.module, set()).update({item.name, item.name.partition("[")[0]})  # type: ignore[attr-defined]
    for module, known in names.items():
        everything = known | {name for name in dir(module) if name.startswith("test_")}
        stale = sorted(set(getattr(module, "EXPECTED_FAILURES", {})) - everything)
        stale = [name for name in stale if name.partition("[")[0] not in everything or name.partition("[")[0] in known]
        if stale:
            raise pytest.UsageError(f"EXPECTED_FAILURES: {stale[0]!r} is no test of {module.__name__}")


def _basis_first(items: list[pytest.Item]) -> None:
    places: dict[Any, list[int]] = {}
    for place, item in enumerate(items):
        if _ROW in item.stash:
            places.setdefault(item.module, []).append(place)  # type: ignore[attr-defined]
    for own in places.values():
        ordered = sorted((items[place] for place in own), key=lambda item: not _is(item, "basis"))
        for place, item in zip(own, ordered, strict=True):
            items[place] = item


def _is(item: pytest.Item, kind: str) -> bool:
    return bool(getattr(getattr(item, "function", None), f"attncore_{kind}", False))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where the plainest steps are wrong, what builds on them would say the same at length."""
    if _ROW not in item.stash or _is(item, "apart") or _is(item, "basis"):
        return
    first = item.config.stash[_BROKEN].get(item.module)  # type: ignore[attr-defined]
    if first:
        pytest.skip(f"{NOT_RUN}{first} fails, and the rest builds on it")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A check that finds its capability undeclared is a skip that says why; a backend that skips a check fails it.

    A check of the kit runs with lent streams: a backend that closes one, or drops a wrapper of it, would close what
    pytest reads for the tests behind it.
    """
    try:
        with contextlib.ExitStack() as around:
            if _ROW in pyfuncitem.stash:
                around.enter_context(lent_streams())
                around.enter_context(_on_cpu())
            return (yield)
    except UnsupportedError as error:
        if _ROW not in pyfuncitem.stash:
            raise
        kinds = {NothingToRefuseError: NOTHING, NotRunError: NOT_RUN}
        return pytest.skip(f"{kinds.get(type(error), 'unsupported: ')}{text_of(error)}")
    except _OUTCOMES as error:  # no check raises them
        if _ROW not in pyfuncitem.stash:
            raise
        raise ConformanceError(f"the backend raises what would skip the check or end the run: {told(error)}") from error


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Torch's default device is the CPU, on which checks draw what they move to the backend's: a conftest of the
    adopter's may have set another.
    """
    # A context slows each call of torch down.
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what came of a test of the kit."""
    row, found = item.stash.get(_ROW, None), call.excinfo
    words = ""
    # --tb=long has all frames
    if row is not None and found and not isinstance(found.value, _OUTCOMES) and _has_short_tracebacks(item.config):
        words = shown(found.value) or "".join(traceback.format_exception(found.value)).rstrip()
    if found and words:
        # pytest would render the whole text of the error, and of those that it was raised from, however long, and the
        # arguments of each frame, of which a repr is the backend's code.
        call.excinfo = _brief(told(found.value))
    try:
        report = yield
    finally:
        call.excinfo = found
    if row is not None and (report.when == "call" or report.outcome != "passed"):
        reports = item.config.stash[_REPORTS]
        reason = ""
        if report.outcome == "skipped":
            expected = getattr(report, "wasxfail", None)
            reason = expected if expected is not None else _skip_reason(report)
        elif report.outcome == "failed":
            words = words or ("" if call.excinfo else _passed_after_all(item, str(report.longrepr)))
            reason = (text_of(call.excinfo.value) or told(call.excinfo.value)) if call.excinfo else words
            report.longrepr = words or report.longrepr
            if _is(item, "basis"):
                item.config.stash[_BROKEN].setdefault(item.module, item.name)  # type: ignore[attr-defined]
        outcome: str = report.outcome
        if outcome == "skipped" and hasattr(report, "wasxfail"):
            outcome = "expected failure"
        elif outcome == "skipped" and reason.startswith(NOT_RUN):
            outcome, reason = "not run", reason.removeprefix(NOT_RUN)
        elif outcome == "skipped" and reason.startswith(NOTHING):
            outcome, reason = "nothing to check", reason.removeprefix(NOTHING)
        reports.setdefault(row[0].title, row[0]).add(Result(row[1], item.name, outcome, reason))
    return report


def _brief(text: str) -> pytest.ExceptionInfo[ConformanceError]:
    try:
        raise ConformanceError(text)
    except ConformanceError as error:
        return pytest.ExceptionInfo.from_exception(error)


def _passed_after_all(item: pytest.Item, otherwise: str) -> str:
    """What is said of an expected failure that passes; a bare name means all cases of a test."""
    name, brackets, _ = item.name.partition("[")
    for expected, why in _expected_failures(item).items():
        if expected == item.name:
            return f"{expected!r} passes, which EXPECTED_FAILURES says fails ({why}): take it out"
        if expected == name and brackets:
            return (
                f"{item.name!r} passes; EXPECTED_FAILURES says that every case of {name!r} fails ({why}): take it out, "
                f"or name the cases that do, each as {item.name!r}"
            )
    return otherwise


def _has_short_tracebacks(config: pytest.Config) -> bool:
    return config.getoption("tbstyle", None) in (None, "auto")


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ").removeprefix("unsupported: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The support table of each backend that was tested, with each set of options and on each device."""
    for report in config.stash.get(_REPORTS, {}).values():
        terminalreporter.section(f"attncore conformance: {report.title}")
        terminalreporter.write_line(report.text())
        if skipped := report.why_skipped():
            terminalreporter.write_line(skipped)


def row_of(item: pytest.Item) -> str | None:
    """The row of the table that a test belongs to; None where it is not the kit's."""
    return item.stash[_ROW][1] if _ROW in item.stash else None


def reports(config: pytest.Config) -> dict[str, Report]:
    """What was collected in this run, by the tables' titles."""
    return config.stash.get(_REPORTS, {})
