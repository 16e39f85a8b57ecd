"""The report of a replay as one file of HTML: facts, times, what the terms mean, and plots."""

from __future__ import annotations

import html
from typing import Any

from attncore import chart_page
from attncore.quoted import one_line
from attncore.replay.results.report import facts, figure, spreads, terms, title, verdict


def as_html(report: dict[str, Any]) -> str:
    """The page; it needs ``attncore[html]`` to be made, and nothing to be read."""
    parts = [
        f"<p>{_text(verdict(report))}</p>",
        *(f"<p>failed: {_text(sentence)}</p>" for sentence in report["verification"]["failures"]),
        "<h2>Times and sizes of a step</h2>",
        chart_page.table(
            ("a step", "p50", "p90", "p99", "max"),
            ((_text(name), *map(figure, values.values())) for name, values in spreads(report)),
        ),
        chart_page.table((), ([*map(_text, pair)] for pair in terms(report))),
        "<h2>The run</h2>",
        chart_page.table((), ([*map(_text, pair)] for pair in [*facts(report), *_versions(report)])),
    ]
    charts = [_requests(report), _tokens(report), _builds(report)]
    return chart_page.page(title(report["trace"]), "\n".join(parts), charts)


def _text(text: str) -> str:
    return html.escape(one_line(text, 1 << 16))


def _versions(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("platform", report["host"]["platform"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("options", ", ".join(f"{name} {value}" for name, value in report["options"].items() if value is not None)),
    ]


def _requests(report: dict[str, Any]) -> str:
    timeline = report["timeline"]
    chart = _over_time("Requests in a step (most), over virtual time")
    chart.add("requests", _points(timeline, "requests"))
    return _rendered(chart)


def _tokens(report: dict[str, Any]) -> str:
    timeline = report["timeline"]
    chart = _over_time(f"Tokens computed in each {timeline['bin_s']:.3g} s, over virtual time")
    for name, text in (("prefill_tokens", "of prompts"), ("decode_tokens", "decoded")):
        chart.add(text, _points(timeline, name))
    return _rendered(chart)


def _over_time(title: str) -> Any:
    return chart_page.library().XY(
        **chart_page.settings(title), show_dots=False, fill=True, include_x_axis=True,
        x_title="virtual seconds", value_formatter=lambda value: f"{value:,.0f}",
        x_value_formatter=lambda value: f"{value:,.4g}",
    )  # fmt: skip


def _points(timeline: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """In the middle of each bin, its value."""
    return [((index + 0.5) * timeline["bin_s"], value) for index, value in enumerate(timeline[name])]


def _builds(report: dict[str, Any]) -> str:
    found = report["build_histogram"]
    chart = chart_page.library().Bar(
        **chart_page.settings("Builds by time: percent of all"),
        x_title="microseconds, from", value_formatter=lambda value: f"{value:.2g} %",
    )  # fmt: skip
    chart.x_labels = [f"{edge:g}" for edge in found["from_us"]]
    for name in ("cold", "hot"):
        if counts := found[name]:
            chart.add(name, [100 * count / sum(counts) for count in counts])
    return _rendered(chart)


def _rendered(chart: Any) -> str:
    text: str = chart.render(is_unicode=True)
    return text
