"""A run of ``attncore bench`` as one file of HTML: its table, what its headers mean, and a plot for each part."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any

from attncore import chart_page
from attncore.quoted import one_line
from attncore.testing.bench.saved_runs import Row, Run


def as_html(
    found: Run, sentences: Sequence[str], headers: Sequence[str], rows: Sequence[Sequence[str]], legend: dict[str, str]
) -> str:
    """The page; ``headers`` and ``rows`` are the printed table's. It takes ``attncore[html]`` to be made."""
    facts = {"device": found.config["device"], **found.machine, **found.versions, "time (UTC)": found.time}
    body = [
        *(f"<p>{_text(sentence)}</p>" for sentence in sentences),
        chart_page.table(headers, ([*map(_text, row)] for row in rows)),
        chart_page.table((), ((name, _text(legend[name])) for name in headers if name in legend)),
        chart_page.table((), ((_text(name), _text(value)) for name, value in facts.items() if value)),
    ]
    parts = dict.fromkeys(row.part for row in found.rows)
    charts = [_chart(found.backend, part, [row for row in found.rows if row.part == part]) for part in parts]
    return chart_page.page(f"attncore bench {found.backend}", "\n".join(body), charts)


def _chart(backend: str, part: str, rows: Sequence[Row]) -> str:
    """Microseconds by step: the backend's, and the reference's where it ran beside."""
    drawn: Any = chart_page.library().HorizontalBar(
        **chart_page.settings(f"{part}, microseconds") | {"height": 120 + 44 * len(rows)},
        value_formatter=lambda value: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}",
    )  # fmt: skip
    rows = rows[::-1]  # the first of them stands highest
    times = [statistics.median(row.median) * 1e6 for row in rows]
    drawn.x_labels = [row.step for row in rows]
    drawn.add(backend, times)
    if any(row.to_reference for row in rows):
        ratios = [statistics.median(row.to_reference) if row.to_reference else None for row in rows]
        drawn.add("reference", [ratio and time / ratio for time, ratio in zip(times, ratios, strict=True)])
    text: str = drawn.render(is_unicode=True)
    return text


def _text(text: str) -> str:
    return html.escape(one_line(text, 1 << 16))
