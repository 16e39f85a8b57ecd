"""The site's interactive plots, from committed runs: plots.html, and history/ with the pages of ``make bench-history``.

``python docs/site/plots.py`` (part of ``make docs``). The performance page shows plots.html in a frame.
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SITE, RESULTS = ROOT / "build" / "site", ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

from attncore import chart_page  # noqa: E402

DECODES = re.compile(r"decode (\d+), contexts 100 to 2000")
PARTS = ("build", "launch", "replay", "batch", "schedule", "fields", "book")
"""The parts of a served step that are drawn; the rest is the wait for the device."""

HEIGHT = """<script>
const tell = () => parent.postMessage({ height: Math.ceil(document.body.getBoundingClientRect().bottom) + 32 }, "*");
new ResizeObserver(tell).observe(document.body);
</script>"""
"""Tells the page around the frame how high the plots are (docs/site/pages.py makes the frame as high)."""


def newest(pattern):
    """The newest committed run of a kind: its name in the repository, and what it holds."""
    file = max(RESULTS.glob(pattern), key=lambda one: one.name)
    return file.relative_to(ROOT).as_posix(), json.loads(file.read_text(encoding="utf-8"))


def microseconds(value):
    return f"{value:,.3g} us" if value < 100 else f"{value:,.0f} us"


def ways_of(run):
    """Every way to build the metadata, of all peers, once: its place is that of its colour in every chart."""
    return list(dict.fromkeys(way for peer in run["peers"] for one in peer["batches"].values() for way in one["us"]))


def peers(run):
    """A chart for each peer: the median of each way to build the metadata, by decodes in the step; logarithmic."""
    numbers = {way: number for number, way in enumerate(ways_of(run))}
    for peer in run["peers"]:
        sizes = {size[1]: one["us"] for batch, one in peer["batches"].items() if (size := DECODES.fullmatch(batch))}
        medians = [one["median"] for ways in sizes.values() for one in ways.values()]
        ways = list(dict.fromkeys(way for one in sizes.values() for way in one))
        title = f"Metadata of a step: attncore beside {peer['peer']}"
        drawn = chart_page.library().Line(
            **chart_page.settings(title, [numbers[way] for way in ways])
            | {"height": 560, "legend_at_bottom_columns": 2 if len(sizes["1"]) < 9 else 1},
            logarithmic=True, value_formatter=microseconds, x_title="decodes in the step, contexts of 100 to 2000",
        )  # fmt: skip
        drawn.x_labels = list(sizes)
        drawn.y_labels = chart_page.ticks(min(medians), max(medians))[::3]  # one of each power of ten
        for way in ways:
            drawn.add(way, [one.get(way, {}).get("median") for one in sizes.values()])
        yield drawn.render(is_unicode=True)


def served(run):
    """A chart for each kernel library: the host's parts of a served step."""
    rows = [row for row in run["rows"] if row["transport"] == "graph" and row["kind"] == "decode"]
    for backend in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == backend]
        drawn = chart_page.library().StackedBar(
            **chart_page.settings(f"The host's part of a served step, {backend}"), value_formatter=microseconds
        )
        drawn.x_labels = [f"{row['model']}, {row['rows']} decodes" for row in mine]
        for part in PARTS:
            drawn.add(part, [row["parts_us"].get(part, {}).get("median", 0) for row in mine])
        yield drawn.render(is_unicode=True)


def whence(name, run):
    machine = run["machine"]
    what = (machine.get("gpu"), machine["cpu"], f"{machine['cores']} cores", f"Python {machine['python']}")
    return f"<code>{name}</code>: {', '.join(filter(None, what))}, {run.get('date') or machine['date']}"


def main():
    (peer_file, peer_run), (step_file, step_run) = newest("peers/*.json"), newest("gpu/served_step_*.json")
    body = (
        "<p>Medians. Point at a mark for its value; click a name below a plot to take it out.</p>"
        f"<p>{whence(peer_file, peer_run)}<br>{whence(step_file, step_run)}</p>"
        '<p><a href="history/index.html" target="_top">Every saved run of the suite over time</a></p>'
    )
    charts = [*peers(peer_run), *served(step_run)]
    page = chart_page.page("Committed runs", body, charts).replace("</body>", f"{HEIGHT}</body>")
    (SITE / "plots.html").write_text(page, encoding="utf-8")
    words = [sys.executable, str(ROOT / "benchmarks" / "history.py"), "--into", str(SITE / "history")]
    return subprocess.run(words, stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
