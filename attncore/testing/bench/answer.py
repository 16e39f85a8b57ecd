"""What the process of one pass has answered, read with suspicion: a backend's code ran in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attncore.quoted import MAX_PART, MOST, one_line
from attncore.testing.bench.saved_runs import is_figure

FIGURES = ("median", "q1", "q3", "to_yardstick", "to_reference")
SETTINGS = (
    "num_heads", "num_kv_heads", "head_size", "block_size", "dtype", "kv_cache_dtype", "kv_cache_layout", "device",
    "transport",
)  # fmt: skip
"""What is said of the backend that was timed."""

DONE = "done"
"""The phase after the last row: a process that a backend has ended before says no such thing."""


@dataclass
class Answer:
    """One pass: figures by step and part, the backend's settings, and steps that it does not support, with reasons."""

    rows: dict[tuple[str, str], dict[str, float | None]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)


def read_pass(lines: Sequence[dict[str, Any]], ended: str) -> Answer:
    """The answer of a process that ended as ``ended`` says (empty: by itself); one that is whole counts anyhow.

    ValueError that says how it failed and where, or that a line of its answer cannot be meant.
    """
    answer, phase, failed = Answer(), "before it was imported", ""
    for line in lines:
        phase = one_line(line.get("phase", phase), MOST)
        failed = failed or one_line(line.get("failed", ""), MAX_PART)
        try:
            _add(answer, line)
        except (ValueError, TypeError, KeyError, AttributeError):
            failed = failed or "its process gave an answer that cannot be meant"
    if failed or (ended and phase != DONE):
        raise ValueError(f"{failed or ended} {phase}")
    if phase != DONE:
        raise ValueError(f"the process ended without an answer {phase}")
    if not answer.rows and not answer.unsupported:
        raise ValueError("its process timed nothing")
    if answer.rows and not answer.config:
        raise ValueError("its process did not say what it timed")
    return answer


def _add(answer: Answer, line: dict[str, Any]) -> None:
    if "config" in line:
        config = {name: line["config"][name] for name in SETTINGS}
        if not all(value is None or type(value) in (int, str) for value in config.values()):
            raise ValueError
        answer.config = {name: _short(value) for name, value in config.items()}
    for step, reason in line.get("unsupported", {}).items():
        answer.unsupported[one_line(step, MOST)] = one_line(reason, MAX_PART) or "no reason is given"
    if "row" in line:
        row = line["row"]
        key = (one_line(row["step"], MOST), one_line(row["part"], MOST))
        figures = {name: row[name] for name in FIGURES}
        absent = figures["to_reference"] is None
        if key in answer.rows or not all(map(is_figure, list(figures.values())[: len(FIGURES) - absent])):
            raise ValueError
        answer.rows[key] = figures


def _short(value: Any) -> Any:
    return one_line(value, MOST) if isinstance(value, str) else value
