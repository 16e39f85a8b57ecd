"""What a run of the kit writes down as it goes: where the backend crashes it, another process has the table from it.

A JSON object a line. pytest is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from attncore.registry.child_process import read_answers, tell
from attncore.temporary_folder import NoRoomError
from attncore.testing.harness.support_table import Report, Result

_MOST = 4000
"""Letters of a reason that are written down."""

FULL = 74
"""The exit code of a run that ended because its journal had no room. Once it has ended there may be room again: files
of its own are gone.
"""


class _Item(Protocol):
    name: str


class Journal:
    """The journal in ``file``, which is made anew."""

    is_full: bool
    """Whether there was no room for a line: the run then ends with FULL, and who reads the journal says why."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._written = 0
        self.is_full = False
        file.write_bytes(b"")

    def begin(self, report: Report) -> None:
        """The backend, and what it is tested with; ``identity`` of ``report`` is known."""
        options = dict(report.options)
        self._tell(backend=report.backend, options=options, device=report.device, identity=report.identity)

    def running(self, item: _Item, capability: str) -> None:
        """A test begins."""
        self._tell(running=item.name, capability=capability)

    def results(self, results: Sequence[Result]) -> None:
        """All results so far, of which the new ones are written."""
        for one in results[self._written :]:
            self._tell(result=[*one[:3], one.reason[:_MOST]])
        self._written = len(results)

    def end(self, code: int) -> None:
        """The command has ended by itself, with an exit code."""
        self._tell(ended=code)

    def _tell(self, **facts: Any) -> None:
        try:
            if not self.is_full:
                tell(self._file, **facts)
        except NoRoomError:
            self.is_full = True


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
