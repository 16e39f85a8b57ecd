"""Draws the saved runs of the suite: a page for each machine, with a chart of every group of benchmarks over time.

    python benchmarks/history.py [--into benchmarks/history]

The runs are those of .benchmarks/ (what `make bench` saved here) and those committed in benchmarks/results/. The pages
hold all that they show; INTO/index.html lists them. The charts are pygal's, in requirements/history.txt.
"""

import argparse
import datetime
import html
import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from attncore import chart_page
from attncore.testing.bench.machine import machine_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks/results/Linux-*/[0-9]*.json", ".benchmarks/*/*/[0-9]*.json")
HEADLINE = ("decode 256", "persistent")


class SavedRun(NamedTuple):
    """One run: when, of which revision, on what, and its benchmarks."""

    time: datetime.datetime
    commit: str
    machine: str
    """A name that files may have."""
    title: str
    """The machine in words."""
    numpy: str
    file: Path
    benchmarks: list


def read(file):
    """The run of a file; ValueError where it holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        info, commit = found["machine_info"], found["commit_info"]
        cpu = info["cpu"]
        cores = info.get("cores") or cpu["count"]
        facts = {name: str(cpu.get(key, "")) for name, key in (("family", "family"), ("model", "model"))}
        name = machine_name({"cpu": cpu["brand_raw"], "cores": str(cores), **facts})
        python = ".".join(info["python_version"].split(".")[:2])
        return SavedRun(
            datetime.datetime.fromisoformat(found["datetime"]).astimezone(datetime.UTC),
            (commit["id"] or "")[:7] + ("+" if commit.get("dirty") else ""),
            f"{name}-{info['python_implementation'].lower()}-{python}",
            f"{cpu['brand_raw']}, {cores} cores, {info['python_implementation']} {python}",
            info.get("numpy", ""),
            file,
            [one for one in found["benchmarks"] if one["stats"]["median"] > 0],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} holds no run: {error!r}") from error


def machines(paths):
    """Machine -> its runs, the oldest first. A file that holds no run is a line on standard error."""
    found = defaultdict(list)
    for path in paths:
        try:
            run = read(path)
        except ValueError as error:
            print(f"history: {error}", file=sys.stderr)
        else:
            found[run.machine].append(run)
    return {name: sorted(runs, key=lambda run: run.time) for name, runs in sorted(found.items())}


def series(runs):
    """Group -> way -> (time, median, interquartile range, commit) of each run that has it; seconds."""
    found = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for one in run.benchmarks:
            way = one["extra_info"].get("way", one["name"])
            found[one["group"]][way].append((run.time, one["stats"]["median"], one["stats"]["iqr"], run.commit))
    return dict(sorted(found.items(), key=lambda item: natural(item[0])))


def natural(text):
    """A key that sorts "decode 8" before "decode 128"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split("([0-9]+)", text) if part]


def in_units(seconds):
    for unit, size in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def dates(runs):
    """Up to five times of runs, far enough apart to be read, and how they are written."""
    first, last = runs[0].time, runs[-1].time
    form = "%Y-%m-%d" if last - first > datetime.timedelta(days=3) else "%m-%d %H:%M"
    if first == last:
        return [first], form
    return [first + (last - first) * i / 4 for i in range(5)], form


def chart(group, ways, runs):
    """An SVG of one group over the time of all runs of the machine."""
    labels, form = dates(runs)
    medians = [median for points in ways.values() for _, median, *_ in points]
    drawn = chart_page.library().DateTimeLine(
        **chart_page.settings(group), logarithmic=True, dots_size=3,
        x_value_formatter=lambda time: time.strftime(form), value_formatter=in_units,
    )  # fmt: skip
    room = max((runs[-1].time - runs[0].time) * 0.03, datetime.timedelta(hours=1))  # one run has no width of its own
    drawn.xrange = tuple(time.timestamp() for time in (runs[0].time - room, runs[-1].time + room))
    drawn.x_labels = labels
    drawn.y_labels = chart_page.ticks(min(medians), max(medians))
    drawn.range = (drawn.y_labels[0] * 0.95, drawn.y_labels[-1] * 1.05)
    for way, points in ways.items():
        values = [
            {"value": (time, median), "label": f"{commit}, interquartile range {in_units(iqr)}"}
            for time, median, iqr, commit in points
        ]
        drawn.add(way, values)
    return drawn.render(is_unicode=True)


def machine_page(runs):
    """The page of one machine: its runs, and a chart for each group."""
    rows = [(f"{run.time:%Y-%m-%d %H:%M}", *map(html.escape, (run.commit, run.numpy, run.file.name))) for run in runs]
    charts = [chart(group, ways, runs) for group, ways in series(runs).items()]
    body = (
        '<p><a href="index.html">All machines</a>. Medians; a + marks uncommitted changes. Ratios within one run tell '
        "more than microseconds.</p>\n" + chart_page.table(("Run (UTC)", "Revision", "NumPy", "File"), rows)
    )
    return chart_page.page(runs[0].title, body, charts)


def index_page(found):
    """The page that lists all machines."""
    rows = []
    for name, runs in found.items():
        points = series(runs).get(HEADLINE[0], {}).get(HEADLINE[1], [])
        last = in_units(points[-1][1]) if points else "-"
        times = [f"{run.time:%Y-%m-%d}" for run in (runs[0], runs[-1])]
        rows.append((f'<a href="{name}.html">{html.escape(runs[0].title)}</a>', len(runs), *times, last))
    return chart_page.page(
        "Metadata-build latency", chart_page.table(("Machine", "Runs", "First", "Last", "Decode 256, last"), rows)
    )


def main(words):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "benchmarks" / "history", metavar="FOLDER")
    options = parser.parse_args(words)
    found = machines(sorted(itertools.chain.from_iterable(ROOT.glob(folder) for folder in FOLDERS)))
    if not found:
        print("history: no run is saved yet; make bench saves one", file=sys.stderr)
        return 2
    try:
        options.into.mkdir(parents=True, exist_ok=True)
        for name, runs in found.items():
            (options.into / f"{name}.html").write_text(machine_page(runs), encoding="utf-8")
        (options.into / "index.html").write_text(index_page(found), encoding="utf-8")
    except ImportError as error:
        print(f"history: {error}; pip install -r requirements/history.txt", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"history: --into: {error}", file=sys.stderr)
        return 2
    print(f"{len(found)} machines, {sum(map(len, found.values()))} runs: {options.into / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
