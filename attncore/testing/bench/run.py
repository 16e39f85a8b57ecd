"""A run of ``attncore bench``: its passes, each in a child process, put together."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attncore._version import __version__
from attncore.errors import AttncoreError
from attncore.json_output import json_text
from attncore.registry import package_requirements
from attncore.registry.child_process import read_answers, run_in_child
from attncore.registry.host.free_memory import available_bytes
from attncore.show import counted
from attncore.temporary_folder import check_room, temporary_folder, write_temporary
from attncore.testing.bench.answer import DONE, FIGURES, Answer, read_pass
from attncore.testing.bench.machine import machine
from attncore.testing.bench.saved_runs import Row, Run
from attncore.testing.engines.saved_steps import SavedSteps, parse_steps, read_bytes


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
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the backend is created with."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that its spec declares and that are set."""

    def as_json(self, copy: Path) -> str:
        """What the child reads. The file of steps is read once: every pass reads ``copy``, which is made of it here.

        ValueError where the file has no steps, or they do not fit in memory.
        """
        facts: dict[str, Any] = {"backend": self.backend, "device": self.device, "seconds": self.seconds}
        facts["options"] = dict(self.options)
        facts["steps"] = None if self.steps is None else str(copy)
        if self.steps is not None:
            data = _read(self.steps)
            facts["block_size"] = _checked_block_size(self, data)
            write_temporary(copy, data)
        return json_text(facts)


def measure(question: Question, passes: int, done: Callable[[int], None] | None = None) -> Run:
    """Run ``passes`` one after the other; ``done`` is told how many have ended. PassError where one fails."""
    with temporary_folder("bench") as temporary:
        return _measured(question, passes, done, Path(temporary, "steps"))


def _measured(question: Question, passes: int, done: Callable[[int], None] | None, copy: Path) -> Run:
    asked = question.as_json(copy)
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
        config=answer.config | _given(question),
        steps="" if question.steps is None else hashlib.sha256(copy.read_bytes()).hexdigest()[:12],
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


def _given(question: Question) -> dict[str, Any]:
    """What the backend's times depend on beside its own settings, as far as anything is given."""
    given = {"options": dict(question.options), "variables": dict(question.variables)}
    return {name: values for name, values in given.items() if values}


def _one_pass(question: Question, asked: str) -> Answer:
    with temporary_folder("bench") as temporary:
        ask, answer = Path(temporary, "question"), Path(temporary, "answer")
        write_temporary(ask, asked.encode())
        ended = run_in_child(["-m", "attncore.testing.bench.one_pass", str(ask), str(answer)], question.timeout)
        found = read_answers(answer)
        if not any(line.get("phase") == DONE for line in found):
            check_room(answer)
    try:
        return read_pass(found, ended)
    except ValueError as error:
        raise PassError(f"NAME: {question.backend} cannot be timed: {error}") from None


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise ValueError(f"--steps: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--steps: {error}") from error


def _checked_block_size(question: Question, data: bytes) -> int:
    """That of the file of steps, every line of which is built once; ValueError where one is no batch."""
    try:
        steps = parse_steps(str(question.steps), data, every_line=True)
    except ValueError as error:
        is_trace = b'"hash_ids"' in data[:4096] or data.lstrip().startswith(b"TIMESTAMP,")
        hint = "; it is a trace of requests, of which attncore replay TRACE --save-steps FILE makes steps"
        raise ValueError(f"--steps: {error}{hint if is_trace else ''}") from error
    _check_memory(question, steps)
    return steps.batches[0].block_size


def _check_memory(question: Question, steps: SavedSteps) -> None:
    """ValueError where a pass over the steps, and over its own with blocks of that size, does not fit in memory.

    Counted for float32; a few numbers of a file may ask for any size.
    """
    import torch

    from attncore.testing.engines.timed_steps import REQUEST, SHAPES

    size = steps.batches[0].block_size
    own = max(1 + sum(-(-(context + tokens) // size) for context, tokens in one) for one in SHAPES.values())
    sequences = [one for batch in steps.batches for group in batch.groups for one in group.sequences]
    longest = max(one.context_len + one.query_len for one in sequences)  # is gathered
    heads, kv_heads = REQUEST["num_heads"] or 1, REQUEST["num_kv_heads"] or 1
    numbers = (max(own, steps.num_blocks) * size + longest) * 2 * kv_heads
    numbers += sum(one.query_len for one in sequences) * 2 * (heads + kv_heads)
    needed = numbers * (REQUEST["head_size"] or 1) * 4 * (1 if question.backend == "reference" else 2)
    free = available_bytes(question.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if needed > free:
        raise ValueError(
            f"--steps: {question.steps}: block_size {size}, {counted(steps.num_blocks, 'block')} and sequences of up "
            f"to {counted(longest, 'token')} take {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free; give smaller steps"
        )


def _versions(question: Question) -> dict[str, str]:
    found = {"python": platform.python_version(), "attncore": __version__, "distribution": question.version}
    names = ("numpy", "torch")
    return found | dict.fromkeys(names, "") | package_requirements.installed(names)
