"""One pass of ``attncore bench``, in a process of its own, given two files: QUESTION ANSWER.

Writes a JSON object a line to ANSWER: what is about to be tried, before it is, so that the last line tells where a
crash happened; a row for each step and each part of it that was timed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attncore.errors import AttncoreError
from attncore.process_end import run_as_child
from attncore.quoted import describe_error
from attncore.registry.child_process import tell
from attncore.testing.bench.answer import DONE, SETTINGS
from attncore.testing.bench.turns import Call, device_yardstick, host_yardstick, in_turns
from attncore.testing.engines.timed_steps import REQUEST, SAVED, SHAPES, Timed
from attncore.testing.harness.errors import UnsupportedError
from attncore.testing.harness.subject import Subject

PARTS = {"build": True, "plan": False, "commit": True, "forward": False}
"""What is timed of a step -> whether the requests have to be put back before each call."""


def main(question: str, answer: str) -> None:
    """Answer ``question``, in JSON: backend, device, file of saved steps, seconds for each row."""
    asked = json.loads(Path(question).read_text(encoding="utf-8"))
    torch.set_num_threads(1)  # several wait for each other on a busy machine longer than they compute
    file = Path(answer)
    try:
        for facts in _facts(asked):
            tell(file, **facts)
        tell(file, phase=DONE)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the backend, which may raise anything
        tell(file, failed=describe_error(error))


def _facts(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    steps = asked["steps"]
    request = dict(REQUEST)
    if steps is not None:
        request["block_size"] = asked["block_size"]
    told = False
    for shape in [*SHAPES, *([SAVED] if steps is not None else [])]:
        yield {"phase": f"while {shape!r} was made"}
        try:
            subject = Subject(asked["backend"], device=asked["device"], options=asked["options"], checks_needs=False)
            timed = Timed(subject, shape, request, steps)
        except UnsupportedError as error:
            yield {"unsupported": {shape: str(error)}}
            continue
        if not told:
            told = True
            yield {"config": _config(timed)}
        beside = None if asked["backend"] == "reference" else _reference(timed, shape, steps)
        for part, resets in PARTS.items():
            yield {"phase": f"while {part} of {shape!r} was timed"}
            yield {"row": {"step": shape, "part": part, **_row(timed, beside, part, resets, asked["seconds"])}}


def _row(timed: Timed, beside: Timed | None, part: str, resets: bool, seconds: float) -> dict[str, Any]:
    device = timed.config.device
    ways = {"yardstick": device_yardstick(device) if part == "forward" else host_yardstick()}
    for name, one in (("backend", timed), ("reference", beside)):
        if one is not None:
            if part == "forward":
                one.plan()
            ways[name] = Call(getattr(one, part), one.reset if resets else None)
    found = in_turns(ways, seconds)

    def ratio(other: str) -> float:
        return statistics.median(a / b for a, b in zip(found["backend"], found[other], strict=True))

    low, median, high = statistics.quantiles(found["backend"], n=4, method="inclusive")
    return {
        "median": median,
        "q1": low,
        "q3": high,
        "to_yardstick": ratio("yardstick"),
        "to_reference": ratio("reference") if beside is not None else None,
    }


def _reference(timed: Timed, shape: str, steps: str | None) -> Timed | None:
    """The same steps by the reference, of the same sizes and on the same device; None where it cannot."""
    config = timed.config
    request = {
        name: getattr(config, name)
        for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype", "block_size", "use_mla")
    }
    try:
        return Timed(Subject("reference", device=str(config.device), checks_needs=False), shape, request, steps)
    except (AttncoreError, ValueError, TypeError):
        return None


def _config(timed: Timed) -> dict[str, Any]:
    facts = {name: getattr(timed.config, name, None) for name in SETTINGS}
    return {**facts, "device": str(timed.config.device), "transport": timed.transport}


if __name__ == "__main__":
    run_as_child(main)
