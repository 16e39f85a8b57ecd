"""What a run of the kit writes down as it goes: where the backend crashes it, another process has the table from it.

A JSON object a line. pytest is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from attncore.json_output import json_text
from attncore.registry.child_process import read_answers
from attncore.testing.harness.support_table import Report, Result

_MOST = 4000
"""Letters of a reason that are written down."""


class _Item(Protocol):
    name: str


class Journal:
    """The journal in ``file``, which is made anew."""

    def __init__(self, file: Path) -> None:
        self._opened = file.open("w", encoding="utf-8")
        self._written = 0

    def begin(self, report: Report) -> None:
        """The backend, and what it is tested with; ``identity`` of ``report`` is known."""
        self._write(
            backend=report.backend, options=dict(report.options), device=report.device, identity=report.identity
        )

    def running(self, item: _Item, capability: str) -> None:
        """A test begins."""
        self._write(running=item.name, capability=capability)

    def results(self, results: Sequence[Result]) -> None:
        """All results so far, of which the new ones are written."""
        for one in results[self._written :]:
            self._write(result=[*one[:3], one.reason[:_MOST]])
        self._written = len(results)

    def end(self, code: int) -> None:
        """The command has ended by itself, with an exit code."""
        self._write(ended=code)

    def _write(self, **facts: Any) -> None:
        self._opened.write(json_text(facts) + "\n")
        self._opened.flush()


@dataclass
class Noted:
    """What is found in a journal."""

    report: Report | None = None
    """None where no test was about to begin."""
    running: Mapping[str, str] | None = None
    """``running`` and ``capability`` of the test that has begun and not ended."""
    ended: int | None = None
    """The exit code of a command that has ended by itself."""
    tests: list[str] = field(default_factory=list)


def read_journal(file: Path) -> Noted:
    """What a journal has, as far as it was written."""
    noted = Noted()
    for line in read_answers(file):
        match line:
            case {"backend": name, "options": options, "device": device, "identity": identity}:
                noted.report = Report(name, options, device, identity)
            case {"running": str(), "capability": str()}:
                noted.running = line
                noted.tests.append(line["running"])
            case {"result": [capability, test, outcome, reason]} if noted.report is not None:
                noted.report.add(Result(capability, test, outcome, reason))
                noted.running = None
            case {"ended": int(code)}:
                noted.ended = code
    return noted
