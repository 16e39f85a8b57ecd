"""One plugin examined in a process of its own, with a time limit: what hangs or crashes there is a row here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason

PHASES = {
    "start": "before anything of it was loaded",
    "spec": "while its spec was read",
    "doctor": "while its attncore_doctor ran",
    "create": "while the backend was created",
}


@dataclass(frozen=True)
class Examination:
    """What came of one plugin: its record, the facts of its ``attncore_doctor``, and whether a backend was made.

    ``created`` is a sentence: what was made, or why it was not tried; empty where it failed (the record says how).
    """

    record: PluginRecord
    facts: dict[str, str] = field(default_factory=dict)
    created: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The row as JSON types."""
        return {
            "name": self.record.name,
            "distribution": self.record.distribution,
            "version": self.record.version,
            "state": self.record.state,
            "reasons": [reason.as_json() for reason in self.record.reasons],
            "facts": self.facts,
            "created": self.created,
            "seconds": round(self.seconds, 3),
        }


def examine(record: PluginRecord, *, timeout: float, create: bool = True) -> Examination:
    """Load a found plugin in another process, ask its doctor hook, and (``create``) make a small backend.

    The process and its children are killed after ``timeout`` seconds. A record that is not ``found`` is returned as is.
    """
    if record.state != "found":
        return Examination(record)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="attncore-doctor-") as folder:
        answers = Path(folder, "answers")
        arguments = [record.name, record.distribution, str(answers), *(["--create"] if create else [])]
        ended = run_apart("attncore.registry.doctor.child_main", arguments, timeout)
        lines = answers.read_text().splitlines() if answers.exists() else []
    examination = _read(record, [json.loads(line) for line in lines], ended)
    return replace(examination, seconds=time.perf_counter() - started)


def run_apart(module: str, arguments: Sequence[str], timeout: float) -> str:
    """Run a module in another process, which is killed with its children after ``timeout`` seconds.

    Returns how it ended, as a sentence; empty where it came to its end. What it prints is dropped. The current folder
    is not searched for modules. A grandchild that left the process's session lives on, and nobody waits for it.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryFile() as errors:  # a pipe would be open until the last grandchild is gone
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],  # -P: the current folder is not on the path
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environ,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"it gave no answer within {timeout:g} s"
        finally:
            _kill_group(process)
        if process.returncode < 0:
            return f"the process died of {_signal_name(-process.returncode)}"
        if process.returncode:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
            last = errors.read(4096).decode(errors="replace").strip().rpartition("\n")[2]
            return f"the process ended with code {process.returncode}" + (f" ({last[:200]})" if last else "")
        return ""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # what the plugin itself started, too
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(record: PluginRecord, answers: list[dict[str, Any]], ended: str) -> Examination:
    phase, state, reasons, facts, created = "start", "found", [], {}, ""
    for answer in answers:
        phase = answer.get("phase", phase)
        state = answer.get("state", state)
        reasons += [Reason(**reason) for reason in answer.get("reasons", ())]
        facts.update(answer.get("facts", {}))
        created = answer.get("created", created)
    if ended or phase != "done":
        where = PHASES.get(phase, "at its end")
        message = f"{ended or 'the process ended without an answer'} {where}"
        fix = f"update {record.distribution}, or keep it out with ATTNCORE_DISABLE_PLUGINS={record.name}"
        reasons.append(Reason("broken", message, asked=phase, source=record.label, fix=fix))
        state, created = "broken", ""
    return Examination(replace(record, state=state, reasons=tuple(reasons)), facts, created)
