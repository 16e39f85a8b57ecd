"""A run of ``attncore bench``: its passes, each in a child process, put together."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attncore._version import __version__
from attncore.errors import AttncoreError
from attncore.input_files import parse_json, read_file
from attncore.json_lines.json_fields import integer
from attncore.registry.child_process import read_answers, run_in_child
from attncore.testing.bench.answer import FIGURES, Answer, read_pass
from attncore.testing.bench.machine import machine
from attncore.testing.bench.saved_runs import Row, Run
from attncore.testing.engines.saved_steps import MAX_BYTES, MAX_DEPTH


class PassError(AttncoreError):
    """A pass of a backend that failed, crashed or hung; says which and where."""


@dataclass(frozen=True)
class Question:
    """What every pass is asked."""

    backend: str
    version: str
    """The distribution that the backend is of, with its version."""
    device: str | None = None
    steps: Path | None = None
    seconds: float = 0.15
    """For each row, in each pass."""
    timeout: float = 600.0

    def as_json(self) -> str:
        """What the child reads."""
        facts: dict[str, Any] = {"backend": self.backend, "device": self.device, "seconds": self.seconds}
        facts["steps"] = None if self.steps is None else os.path.realpath(self.steps)
        if self.steps is not None:
            facts["block_size"] = _block_size(self.steps)
        return json.dumps(facts)


def measure(question: Question, passes: int, done: Callable[[int], None] | None = None) -> Run:
    """Run ``passes`` one after the other; ``done`` is told how many have ended. PassError where one fails."""
    asked = question.as_json()
    rows: dict[tuple[str, str], Row] = {}
    for number in range(passes):
        answer = _one_pass(question, asked)
        if number and answer.rows.keys() != rows.keys():
            raise PassError(
                f"NAME: {question.backend} cannot be timed: pass {number + 1} has other rows than the first"
            )
        for key, row in answer.rows.items():
            into = rows.setdefault(key, Row(*key))
            for name in FIGURES:
                if row[name] is not None:
                    getattr(into, name).append(row[name])
        if done is not None:
            done(number + 1)
    return Run(
        backend=question.backend,
        machine=machine(),
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z",
        versions=_versions(question),
        config=answer.config,
        steps="" if question.steps is None else hashlib.sha256(read_file(question.steps, MAX_BYTES)).hexdigest()[:12],
        rows=list(rows.values()),
        unsupported=answer.unsupported,
    )


def joined(first: Run, second: Run) -> Run:
    """The passes of two runs of the same question as those of one."""
    more = {(row.step, row.part): row for row in second.rows}
    for row in first.rows:
        for name in FIGURES if (row.step, row.part) in more else ():
            getattr(row, name).extend(getattr(more[row.step, row.part], name))
    return first


def _one_pass(question: Question, asked: str) -> Answer:
    with tempfile.TemporaryDirectory(prefix="attncore-bench-", ignore_cleanup_errors=True) as temporary:
        ask, answer = Path(temporary, "question"), Path(temporary, "answer")
        ask.write_text(asked, encoding="utf-8")
        ended = run_in_child(["-m", "attncore.testing.bench.one_pass", str(ask), str(answer)], question.timeout)
        found = read_answers(answer)
    try:
        return read_pass(found, ended)
    except ValueError as error:
        raise PassError(f"NAME: {question.backend} cannot be timed: {error}") from None


def _block_size(steps: Path) -> int:
    try:
        lines = read_file(steps, MAX_BYTES).splitlines()
    except OSError as error:
        raise ValueError(f"--steps: {steps} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--steps: {steps} {error}") from error
    try:
        record = parse_json(next((line for line in lines if line.strip()), b""), MAX_DEPTH)
        return integer("block_size", record["block_size"], 1)
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"--steps: {steps} does not begin with a batch; it takes what `attncore replay --save-steps FILE` writes"
        ) from None


def _versions(question: Question) -> dict[str, str]:
    found = {"python": platform.python_version(), "attncore": __version__, "distribution": question.version}
    for name in ("numpy", "torch"):
        found[name] = importlib.metadata.version(name)
    return found
