"""Time a backend's steps on this machine, beside the reference, and compare them with saved runs.

Times the build of a step's metadata, the backend's plan, the commit (all that an engine's call does on the host) and
one layer's forward, over steps of several shapes and over those of --steps. Several passes, a process each; in a pass
the backend, the reference and a fixed piece of work take turns, on one thread. The run is saved in a folder of the
user's, and compared with the last saved ones of the same backend, sizes and machine.

A row counts as slower only if its passes took longer than those of the last five saved runs, by the clock and relative
to the fixed work, one pass in five left out; they are then repeated and judged together. That takes three saved runs,
more than 3 %, and more than the fixed work itself has changed. Exits with 0 also where a row is slower, with 1 then if
--strict is given, or where the backend cannot be timed; with 3 where it cannot be used here.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncore import env
from attncore.cli.argument_types import add_integer, backend_name, file_path, number
from attncore.cli.html_file import html_file
from attncore.cli.installed_backends import check_installed
from attncore.cli.output import print_table
from attncore.cli.progress_bar import progress_bar
from attncore.command import UsageError, check_current_folder, fail, load_torch, name_in_place_of
from attncore.errors import NoBackendError
from attncore.how_to_install import install_extra
from attncore.json_output import print_json
from attncore.kept_files import state_folder
from attncore.quoted import one_line, quoted
from attncore.registry.choice.runs_here import reasons_here
from attncore.registry.host.host import Host
from attncore.registry.plugins.load import registry
from attncore.registry.plugins.option_argument import add_option_argument, options_of
from attncore.show import counted
from attncore.standard_output import stdout_to_stderr
from attncore.terminal import columns, print_lines
from attncore.testing.device_option import check_device
from attncore.written_file import check_written_file

if TYPE_CHECKING:
    from attncore.replay.results.whole_file import WholeFile
    from attncore.testing.bench.change import Change
    from attncore.testing.bench.run import Question
    from attncore.testing.bench.saved_runs import Row, Run

NARROW, WIDE = 80, 110
"""Columns of a terminal: with fewer than the first every step has a table of its own, from the second on the trend is
shown. A pipe or a file has room for all.
"""
SHORTEST = 0.05
"""Seconds of a row and pass below which times are too few to be compared, or to be saved for a comparison."""
_LEGEND = {
    "PART": "build: the metadata; plan: what the backend prepares for its kernels; commit: all that an engine's call "
    "does on the host, both and the rest; forward: one layer",
    "IQR": "what half of a pass's times lie within, in percent of MEDIAN",
    "TO REF": "the time in times of the reference's, beside which it ran",
    "CHANGE": "against this machine's saved runs, in times of a fixed piece of work that is timed beside each row, so "
    "that a slower machine is no change; MEDIAN is by the clock and may tell otherwise",
    "USUAL": "what the passes of the saved runs lie between",
}
"""What the headers of the table mean."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    name_in_place_of(parser, backend="the argument NAME")
    parser.add_argument("name", type=backend_name, metavar="NAME", help="the backend, as `attncore list` prints it")
    parser.add_argument("--device", help="a torch device (default: the negotiation's)")
    add_option_argument(parser, "NAME")
    parser.add_argument(
        "--steps", type=file_path, metavar="FILE", help="also steps that `attncore replay --save-steps` wrote"
    )
    add_integer(parser, "--passes", 3, 100, 5, "how often all is measured, 3 to 100 times, each in a new process")
    parser.add_argument(
        "--seconds",
        type=number(0.001, 60),
        default=0.15,
        metavar="S",
        help=f"for each row and pass (default 0.15); a run of less than {SHORTEST:g} is not compared and not saved",
    )
    parser.add_argument(
        "--timeout", type=number(1, 1e6), default=600.0, metavar="SECONDS", help="for each pass (default 600)"
    )
    parser.add_argument("--no-save", action="store_true", help="compare with saved runs, and do not add this one")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a row is slower than in saved runs")
    parser.add_argument(
        "--html",
        type=file_path,
        metavar="FILE",
        help="write the run to FILE too, as a page with plots (attncore[html])",
    )
    parser.add_argument("--json", action="store_true", help="print the run and how it differs as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, compare, save, print; 1 where the backend cannot be timed, or with --strict is slower."""
    if importlib.util.find_spec("torch") is None:
        raise NoBackendError(f"torch is not installed: {install_extra('torch')}")
    check_current_folder()
    from attncore.testing.bench.run import Question

    too_short = args.seconds < SHORTEST
    if too_short and args.strict:
        raise UsageError(
            f"--strict: --seconds {args.seconds:g} is too short to compare runs; give {SHORTEST:g} or more"
        )
    if args.html:
        check_written_file("--html", args.html, {"the file of --steps": args.steps})
    with html_file(args.html) as page:  # first: a mistyped name is said before torch is imported
        with stdout_to_stderr():
            check_installed("NAME", args.name)
            options = options_of(args.name, args.option, "NAME")
            version = _installed(args.name, args.device, options)
            variables = _variables(args.name)
        question = Question(args.name, version, args.device, args.steps, args.seconds, args.timeout, options, variables)
        return _run(args, question, page)


def _run(args: argparse.Namespace, question: Question, page: WholeFile | None) -> int:
    from attncore.testing.bench.run import PassError, joined, measure

    too_short = args.seconds < SHORTEST
    try:
        found = _measured(question, args.passes, measure)
        saved, left_out = ([], []) if too_short else _earlier(found)
        for name in left_out:
            print_lines(
                f"attncore bench: the saved run {quoted(name)} is left out: it is damaged or not yours", sys.stderr
            )
        if any(one.verdict == "slower" for one in _changes(found, saved)):
            print_lines("some rows look slower than in the saved runs: all is measured once more", sys.stderr)
            found = joined(found, _measured(question, args.passes, measure))
    except PassError as error:
        return fail(error, 1)
    changes = _changes(found, saved)
    if too_short:
        changes = [replace(one, verdict="too short") for one in changes]
    file = None if args.no_save or too_short else _saved(found)
    if page is not None:
        from attncore.testing.bench.html_page import as_html

        sentences = [_heading(found), *_unsupported(found), _summary(changes, saved)]
        page.write(as_html(found, sentences, *_table(found, changes, wide=bool(saved)), _LEGEND))
    if args.json:
        print_json(_as_json(found, changes, saved, file))
    else:
        _print(found, changes, saved)
        if too_short:
            print_lines(f"--seconds {args.seconds:g} is too short to compare runs, and the run is not saved")
        else:
            print_lines(_summary(changes, saved))
        if file is not None:
            print_lines(f"saved as {file}")
        if args.html:
            print_lines(f"page written to {one_line(str(args.html))}")
    return 1 if args.strict and any(one.verdict == "slower" for one in changes) else 0


def _installed(name: str, device: str | None, options: dict[str, Any]) -> str:
    """The backend's distribution and version; NoBackendError where it is not installed or cannot be used here."""
    load_torch()
    from attncore.testing.harness.errors import UnsupportedError
    from attncore.testing.harness.subject import Subject

    check_device(device)
    if device is not None and device.partition(":")[0] == "meta":
        raise UsageError("--device: meta computes nothing, so that its times are none; give another")
    subject = Subject(name, device=device, options=options, checks_needs=False)
    try:
        refusal = subject.refusal
    except UnsupportedError as error:  # the plugin did not load
        raise NoBackendError(f"NAME: {error}".replace("BACKEND: ", "")) from error
    if refusal:
        host = (subject.host or Host.probe()).with_packages(registry().packages)
        reasons = [str(reason) for reason in reasons_here(subject.record, host)] or [refusal]
        between = "\n  " if len(reasons) > 1 else " "
        raise NoBackendError(between.join((f"NAME: {quoted(name)} cannot be used here:", *reasons)))
    return f"{subject.record.distribution} {subject.record.version}"


def _variables(name: str) -> dict[str, str]:
    """The environment variables that the backend's spec declares and that are set."""
    specs = [record.spec for record in registry().records if record.name == name and record.spec is not None]
    return env.values(sorted({one for spec in specs for _, form in spec.by_variant for one in form.variables}))


def _measured(question: Question, passes: int, measure: Any) -> Run:
    with progress_bar(passes, "passes") as done:
        found: Run = measure(question, passes, done)
    if not found.rows:
        reasons = "; ".join(dict.fromkeys(found.unsupported.values()))
        raise NoBackendError(f"NAME: {question.backend!r} runs none of the steps: {reasons}")
    return found


def _changes(found: Run, saved: list[Run]) -> list[Change]:
    from attncore.testing.bench.change import change

    return [change(row, saved) for row in found.rows]


def _earlier(found: Run) -> tuple[list[Run], list[str]]:
    """The saved runs of the same conditions, and the names of those left out; none for a user without a home."""
    from attncore.testing.bench.saved_runs import load

    try:
        return load(found, state_folder("bench"))
    except RuntimeError:
        return [], []


def _saved(found: Run) -> Path | None:
    """Where the run was saved; None, with a line on standard error, where that is not possible."""
    from attncore.testing.bench.saved_runs import save

    try:
        return save(found, state_folder("bench"))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        print_lines(f"attncore bench: the run is not saved: {error}", sys.stderr)
        return None


def _as_json(found: Run, changes: list[Change], saved: list[Run], file: Path | None) -> dict[str, Any]:
    shown = found.as_json()
    for row, one in zip(shown["rows"], changes, strict=True):
        row["change"] = {"verdict": one.verdict, "percent": one.percent, "usual": [one.low, one.high]}
    return {**shown, "compared_with": [run.time for run in saved], "saved": None if file is None else str(file)}


def _heading(found: Run) -> str:
    config, passes = found.config, len(found.rows[0].median)
    cache = config["kv_cache_dtype"]
    kept = "" if cache in ("auto", config["dtype"]) else f", a cache of {cache}"
    return (
        f"{found.backend} ({found.versions['distribution']}) on {config['device']}: "
        f"{counted(config['num_heads'], 'query head')}, {counted(config['num_kv_heads'], 'key/value head')}, head "
        f"size {config['head_size']}, {config['dtype']}{kept}, blocks of {config['block_size']}; {passes} passes, "
        "one thread"
    )


def _unsupported(found: Run) -> list[str]:
    return [f"{step}: unsupported, {reason}" for step, reason in found.unsupported.items()]


def _table(found: Run, changes: list[Change], wide: bool) -> tuple[list[str], list[list[str]]]:
    """Headers and rows; with ``wide``, also what is usual and the trend."""
    beside = any(row.to_reference for row in found.rows)
    headers = ["STEP", "PART", "MEDIAN", "IQR", *(["TO REF"] if beside else []), "CHANGE"]
    rows = [
        [row.step, row.part, *_figures(row), *([_ratio(row)] if beside else []), _change(one)]
        for row, one in zip(found.rows, changes, strict=True)
    ]
    if wide:
        headers += ["USUAL", "TREND"]
        for cells, one in zip(rows, changes, strict=True):
            cells += [_usual(one), _sparkline(one.trend)]
    return headers, rows


def _print(found: Run, changes: list[Change], saved: list[Run]) -> None:
    print_lines(_heading(found))
    width = columns() or WIDE
    headers, rows = _table(found, changes, wide=width >= WIDE and bool(saved))
    if width >= NARROW:
        print_table(headers, rows)
    else:  # a table for each step, whose name has a line of its own
        for step, members in itertools.groupby(rows, key=lambda cells: cells[0]):
            print_lines(f"{step}:")
            print_table(headers[1:], [cells[1:] for cells in members])
    for line in _unsupported(found):
        print_lines(line)
    for header in headers:
        if header in _LEGEND:
            print_lines(f"{header}: {_LEGEND[header]}")


def _summary(changes: list[Change], saved: list[Run]) -> str:
    from attncore.testing.bench.change import ENOUGH

    if not saved:
        return "no saved run of this backend, these sizes and this machine to compare with: this is the first"
    runs = "1 saved run" if len(saved) == 1 else f"{len(saved)} saved runs"
    if len(saved) < ENOUGH:
        return f"{runs} since {saved[0].time[:10]}: with {ENOUGH} or more, rows that got slower are named"
    slower = sum(one.verdict == "slower" for one in changes)
    return f"{slower} of {counted(len(changes), 'row')} slower than in {runs} since {saved[0].time[:10]}"


def _figures(row: Row) -> tuple[str, str]:
    """The median of the passes' medians, and their usual quartiles' distance in percent of it."""
    middle = statistics.median(row.median)
    spread = statistics.median(high - low for low, high in zip(row.q1, row.q3, strict=True))
    return _time(middle), f"{_percent(spread / middle * 100)}"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _ratio(row: Row) -> str:
    return f"{statistics.median(row.to_reference):.2f}x" if row.to_reference else "-"


def _change(one: Change) -> str:
    if one.percent is None:
        return one.verdict
    return _percent(one.percent, "+") + (f" {one.verdict}" if one.verdict in ("slower", "faster") else "")


def _usual(one: Change) -> str:
    return "-" if one.low is None or one.high is None else f"{_percent(one.low, '+')[:-2]} to {_percent(one.high, '+')}"


def _percent(value: float, sign: str = "") -> str:
    """Whole percents, with ``sign`` a plus before those above 0; neither has 0."""
    whole = round(value)
    return f"{whole:{sign if whole else ''}} %"


def _sparkline(values: Sequence[float]) -> str:
    """A bar for each run, from half the median up to twice as much."""
    if len(values) < 2:
        return ""
    bars, middle = "▁▂▃▄▅▆▇█", statistics.median(values)
    levels = [min(7, max(0, round(3 + 4 * math.log2(value / middle)))) for value in values]
    try:
        bars.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        bars = "12345678"
    return "".join(bars[level] for level in levels)
