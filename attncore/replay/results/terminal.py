"""The report of a replay on standard output: facts, times, what the terms mean, and plots of letters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from attncore.replay.results.report import facts, figure, spreads, terms, title, verdict
from attncore.replay.results.series import in_bins
from attncore.standard_output import kept_stream
from attncore.terminal import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

WIDEST = 120
"""Columns of the plots; text is not wider than 80, whatever the terminal has."""
LINES = {"requests": "requests", "prefill_tokens": "prompt tokens", "decode_tokens": "decode tokens"}
COLORS = {"cold": "cyan", "hot": "yellow"}


def print_report(report: dict[str, Any]) -> None:
    """The report; its last line says in one sentence how it went. Without colour where that is no terminal."""
    from rich.console import Console
    from rich.table import Table

    # Both are given: rich takes any digit in COLUMNS and LINES for a number, and fails.
    stream = kept_stream("stdout")  # a thread of the backend's may replace that of sys
    width = min(columns(stream) or 80, WIDEST)
    console = Console(file=stream, markup=False, highlight=False, emoji=False, width=width, height=25)
    text_width = min(console.width, 80)
    spread = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    spread.add_column("a step", overflow="fold")
    for column in ("p50", "p90", "p99", "max"):
        spread.add_column(column, justify="right")
    for name, values in spreads(report):
        spread.add_row(name, *map(figure, values.values()))
    trace = report["trace"]
    with console.capture() as captured:
        console.print(title(trace), soft_wrap=True)
        for part in ("", _pairs(facts(report)), "", spread, "", _pairs(terms(report)), ""):
            console.print(part, width=text_width)
        _print_timeline(console, report["timeline"])
        _print_histogram(console, report["build_histogram"])
        for failure in report["verification"]["failures"]:
            console.print(f"failed: {failure}", soft_wrap=True)
        console.print(verdict(report), width=text_width)
    # Printed by print: rich fills lines with blanks, and would end the process where a pipe's reader has gone.
    print(re.sub(" +$", "", captured.get(), flags=re.MULTILINE), end="", file=stream)


def _pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _print_timeline(console: Console, timeline: dict[str, Any]) -> None:
    """A line of bars for each thing that is counted, and the most of it."""
    label = max(map(len, LINES.values())) + 2
    lines = {name: in_bins(name, timeline[name], console.width - label - 14) for name in LINES}
    count = len(lines["requests"])
    seconds = timeline["bin_s"] * len(timeline["requests"])
    if not seconds:
        return
    for name, values in lines.items():
        highest = max(values) or 1
        bars = "".join(_column(value / highest) for value in values)
        console.print(f"{LINES[name]:{label}}{bars}  {max(values):>7,.0f}", no_wrap=True, overflow="ignore")
    axis = f"{seconds:,.1f} s"
    if (room := count - len(axis)) >= len("0 "):  # else where it ends is all that is said, from below the labels on
        axis = f"{'0 virtual time' if count >= 30 else '0':{room}}{axis}"
    console.print(f"{axis:>{label + count}}     most", no_wrap=True, overflow="ignore")
    means = (
        f"a column is {seconds / count:.3g} s; most: requests of one step, tokens of one column (a longer step's are "
        "shared among its columns)"
    )
    console.print(means, width=min(console.width, 80))
    console.print()


def _print_histogram(console: Console, histogram: dict[str, Any]) -> None:
    """A line for each range of times: how many builds, cold and hot, were in it. Dots stand for ranges without any."""
    from rich.text import Text

    shown = {name: histogram[name] for name in COLORS if histogram[name]}
    edges = [f"{edge:g}" for edge in histogram["from_us"]]
    if not shown:
        return
    label = max(8, *map(len, edges)) + 2
    room = (console.width - label) // len(shown)
    digits = max(len(f"{count:,}") for counts in shown.values() for count in counts)
    longest = max(4, min(40, room - digits - 3))
    head = "".join(f"  {name + ' builds':<{digits + 1 + longest}}" for name in shown)
    console.print(f"{'from us':>{label - 2}}{head}".rstrip(), no_wrap=True)
    none_before = False
    for index, edge in enumerate(edges):
        none, none_before = none_before, not any(counts[index] for counts in shown.values())
        if none_before:
            if not none:
                console.print(f"{'...':>{label - 2}}", no_wrap=True)
            continue
        line = Text(f"{edge:>{label - 2}}")
        for name, counts in shown.items():
            bar = _bar(counts[index] / max(counts), longest)
            line.append(f"  {counts[index]:>{digits},} ").append(f"{bar:<{longest}}", COLORS[name])
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore")
    console.print()


def _column(part: float) -> str:
    """A letter as high as ``part`` of a line; a blank for 0 alone."""
    letters = " ▁▂▃▄▅▆▇█" if _can_print("▁▂▃▄▅▆▇█") else " .:-=+*%#"
    return letters[min(8, max(1, round(part * 8)))] if part > 0 else " "


def _bar(part: float, longest: int) -> str:
    """A row of letters as long as ``part`` of ``longest``; never nothing for more than 0."""
    if not _can_print("█▏"):
        return "#" * max(1, round(part * longest)) if part > 0 else ""
    eighths = max(1, round(part * longest * 8)) if part > 0 else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _can_print(letters: str) -> bool:
    try:
        letters.encode(getattr(kept_stream("stdout"), "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
