"""Diagnosing one plugin in a child process with a time limit, so that its hang or crash is a row of the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attncore import env
from attncore.quoted import MOST, one_line
from attncore.registry.child_process import read_answers, run_in_child
from attncore.registry.plugins.plugin_record import PluginRecord
from attncore.registry.reasons import Reason
from attncore.registry.spec.plain_values import MAX_ENTRIES
from attncore.temporary_folder import check_room, temporary_folder

PHASES = {
    "start": "before the plugin was loaded",
    "spec": "while its spec was read",
    "doctor": "while its attncore_doctor ran",
    "create": "while the backend was created",
}

_KINDS = {
    "phase": str, "state": str, "created": str, "reasons": list, "missing": list, "facts": dict, "variables": dict,
    "requires": list,
}  # fmt: skip
"""The fields of an answer."""
_STATES = ("loaded", "broken", "incompatible", "blocked", "duplicate")
"""Of a plugin that was read."""


@dataclass(frozen=True)
class Diagnosis:
    """The result for one plugin: its record, the facts of its ``attncore_doctor``, and whether a backend was created.

    ``created`` is a sentence: what was created, or why that was not tried; empty where it failed (the record has the
    reason). ``missing`` are the reasons why the backend cannot run on this host, as ``reasons_here`` gives them;
    ``variables`` what its spec declares, None where no spec was read; ``requires`` the distributions that it
    requires. ``seconds`` is the time that the child process took.
    """

    record: PluginRecord
    facts: dict[str, str] = field(default_factory=dict)
    created: str = ""
    seconds: float = 0.0
    missing: tuple[Reason, ...] = ()
    variables: dict[str, str] | None = None
    requires: tuple[str, ...] = ()

    @property
    def runs_here(self) -> bool:
        """Whether the backend can run on this host, as far as its spec says."""
        return self.record.state == "loaded" and not self.missing

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
            "runs_here": self.runs_here,
            "seconds": round(self.seconds, 3),
        }


def diagnose(record: PluginRecord, *, timeout: float, create: bool = True) -> Diagnosis:
    """Load a found plugin in a child process, call its doctor hook, and (``create``) create a small backend.

    The process and its children are killed after ``timeout`` seconds. A record that is not ``found`` is returned as is.
    """
    if record.state != "found":
        return Diagnosis(record)
    started = time.perf_counter()
    with temporary_folder("doctor") as folder:
        file = Path(folder, "answers")
        arguments = [record.name, record.distribution, str(file), *(["--create"] if create else [])]
        ended = run_in_child(["-m", "attncore.registry.doctor.child_main", *arguments], timeout)
        answers = read_answers(file)
        if not any(answer.get("phase") == "done" for answer in answers):
            check_room(file)
    diagnosis = _read(record, answers, ended)
    return replace(diagnosis, seconds=time.perf_counter() - started)


def _read(record: PluginRecord, answers: list[dict[str, Any]], ended: str) -> Diagnosis:
    """The diagnosis of a process that ended as ``ended`` says (empty: by itself); broken where it was not finished."""
    phase, state, reasons, facts, created = "start", "found", [], {}, ""
    missing: tuple[Reason, ...] = ()
    variables, requires = None, ()
    for answer in answers:
        try:
            told = _checked(answer)
        except (ValueError, TypeError):
            ended = ended or "its process gave an answer that cannot be meant"
            break
        phase = told.get("phase", phase)
        state = told.get("state", state)
        reasons += told.get("reasons", ())
        facts.update(told.get("facts", {}))
        if "missing" in told:
            missing = tuple(told["missing"])
            created = f"cannot run here: {' | '.join(map(str, missing))}" if missing else ""
        variables = told.get("variables", variables)
        requires = tuple(told.get("requires", requires))
        created = told.get("created", created)
    if ended or phase != "done" or state == "found":
        where = PHASES.get(phase, "at its end")
        message = f"{ended or 'the process ended without an answer'} {where}"
        fix = f"update {record.distribution}, or keep it out with ATTNCORE_DISABLE_PLUGINS={record.name}"
        reasons.append(Reason("broken", message, asked=phase, source=record.label, fix=fix))
        state, created = "broken", ""
    found = replace(record, state=state, reasons=tuple(map(_of_its_cause, reasons)))
    return Diagnosis(found, facts, created, missing=missing, variables=variables, requires=requires)


def _of_its_cause(reason: Reason) -> Reason:
    """A plugin that breaks by a variable with a bad value, of which the doctor has a finding, needs no update."""
    for name in env.bad_values() if reason.code == "broken" else ():
        if f"{name}: " in reason.message:
            return replace(reason, fix=f"correct {name}")
    return reason


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """One answer, read with suspicion, for code of the plugin's ran in the process; its reasons are Reasons.

    ValueError or TypeError where a field is of another kind than ``child_main`` gives it, or has another state.
    """
    told = {name: answer[name] for name in _KINDS if name in answer}
    if not all(isinstance(value, _KINDS[name]) for name, value in told.items()):
        raise TypeError
    if told.get("state", _STATES[0]) not in _STATES:
        raise ValueError
    for name in ("reasons", "missing"):
        if name in told:
            told[name] = [Reason(**reason) for reason in told[name][:MAX_ENTRIES]]
    texts = [*told.get("facts", {}).values(), *told.get("variables", {}).values(), *told.get("requires", ())]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    for name in ("phase", "created"):
        if name in told:
            told[name] = one_line(told[name])
    if "facts" in told:
        told["facts"] = {one_line(key, MOST): one_line(value, MOST) for key, value in told["facts"].items()}
    return told
