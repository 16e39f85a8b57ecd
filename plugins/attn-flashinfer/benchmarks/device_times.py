"""Device times of graphs that take turns, and the file that a benchmark of this folder saves."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WARM_UP = 5
"""Replays of each graph that are not counted."""


def graph_of(unit: Callable[[], None], count: int) -> Any:
    """A CUDA graph of ``count`` calls of ``unit``, which runs once before."""
    unit()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    with torch.cuda.graph(graph):
        for _ in range(count):
            unit()
    gc.enable()
    return graph


def times(graphs: dict[str, Any], count: int, rounds: int) -> dict[str, float]:
    """Median device time of a unit of each graph of ``count``, microseconds, the graphs taking turns."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for index in range(rounds + WARM_UP):
        for name, graph in graphs.items():
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            if index >= WARM_UP:
                taken[name].append(first.elapsed_time(last) * 1000 / count)
    return {name: round(statistics.median(one), 3) for name, one in taken.items()}


def compared(makers: dict[str, Callable[[], Callable[[], Any]]], count: int, rounds: int) -> dict[str, Any]:
    """``times`` of graphs of the calls that ``makers`` make; under ``NAME_error`` why one does not run, or differs from
    the first.
    """
    calls, graphs, errors, expected = {}, {}, {}, None  # calls own what their graphs read
    for name, make in makers.items():
        try:
            calls[name] = make()
            found = calls[name]().float()
            expected = found if expected is None else expected
            torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
            graphs[name] = graph_of(calls[name], count)
        except Exception as error:
            errors[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
    return times(graphs, count, rounds) | errors


class Report:
    """Rows of a run, printed as they come and saved with the machine's description where a file is given."""

    def __init__(self, save: Path | None, **machine: str) -> None:
        self._save, self._rows = save, []  # type: ignore[var-annotated]
        self._said = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **machine, "rows": self._rows}

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        print(json.dumps(row), flush=True)
        if self._save:
            self._save.parent.mkdir(parents=True, exist_ok=True)
            self._save.write_text(json.dumps(self._said, indent=1) + "\n")
