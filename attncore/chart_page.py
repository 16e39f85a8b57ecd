"""Pages of HTML with charts, each one file that needs nothing else. The charts are pygal's, of ``attncore[html]``."""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from attncore.palette import FONT, LIGHT, variables

STYLE = f"""
:root {{ color-scheme: light dark }}
{variables()}
body {{ font-family: {FONT}; margin: 2em auto; max-width: 1180px; padding: 0 1em }}
body {{ color: var(--ink); background: var(--paper) }}
h1, code, td + td {{ overflow-wrap: anywhere }}
a {{ color: var(--series-0) }}
table {{ border-collapse: collapse; margin: 1em 0 }}
td, th {{ padding: .2em 1em .2em 0; text-align: left; border-bottom: 1px solid var(--rule) }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(540px, 100%), 1fr)); gap: 1em }}
.charts {{ margin-top: 2em }}
.charts > div {{ justify-self: center; max-width: 600px; width: 100% }}
.charts .tooltip .tooltip-box {{ fill: var(--fill-grey) }}
"""


def library() -> Any:
    """pygal, without the finder of its own on ``sys.meta_path``: Python warns of its protocol at each later import.

    ImportError where it, or pygaljs, is not installed."""
    try:
        import pygal
        import pygal.style
        import pygaljs  # noqa: F401  (page reads it)
    finally:  # also where pygaljs is not installed
        sys.meta_path[:] = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return pygal


def settings(title: str, colours: Iterable[int] = ()) -> dict[str, Any]:
    """What every chart is made with: its title, its size, the page's colours, and nothing that it would fetch.

    ``colours`` are the numbers of the palette's series, in the order of the chart's; 0, 1, 2, ... unless given.
    """
    all_series = range(len(LIGHT.series + LIGHT.more_series))
    series = [f"var(--series-{number % len(all_series)})" for number in colours or all_series]
    series *= 3  # pygal would make more of them by itself, out of hexadecimal ones
    sizes = {
        f"{name}_font_size": size for name, size in (("title", 15), ("legend", 12), ("label", 11), ("tooltip", 12))
    }
    style = library().style.Style(
        font_family=FONT, colors=series, value_colors=series, background="var(--paper)", plot_background="var(--paper)",
        foreground="var(--ink)", foreground_strong="var(--ink)", foreground_subtle="var(--muted)",
        guide_stroke_color="var(--rule)", major_guide_stroke_color="var(--rule)", opacity=".25", opacity_hover=".5",
        stroke_opacity="1", stroke_width="2", **sizes,
    )  # fmt: skip
    return {
        "title": title, "width": 560, "height": 340, "margin_right": 40, "margin_bottom": 36, "js": [],
        "legend_at_bottom": True, "legend_at_bottom_columns": 3, "truncate_legend": -1, "truncate_label": -1,
        "disable_xml_declaration": True,
        "style": style,
    }  # fmt: skip


def ticks(low: float, high: float) -> list[float]:
    """Values 1, 2 and 5 of each power of ten around a range, so that the scale reads well; at least two."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(i for i, one in enumerate(every) if one <= low * (1 + 1e-9))
    last = min(i for i, one in enumerate(every) if one >= high * (1 - 1e-9))
    return every[first : max(last, first + 1) + 1]


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows of cells that are HTML already; without a line of headers where there are none."""
    lines = ["".join(f"<th>{one}</th>" for one in headers)] if headers else []
    lines += ["".join(f"<td>{one}</td>" for one in row) for row in rows]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def page(title: str, body: str, charts: Iterable[str] = ()) -> str:
    """The page; with ``charts``, SVG as pygal renders it, also the script that shows a point's value."""
    script, shown = "", "".join(f"<div>{chart}</div>\n" for chart in charts)
    if shown:
        tooltips = files("pygaljs").joinpath("static/2.0.x/pygal-tooltips.min.js").read_text(encoding="utf-8")
        body, script = f'{body}\n<div class="charts">\n{shown}</div>', f"<script>{tooltips}</script>\n"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>\n<h1>{html.escape(title)}</h1>\n{body}\n</main>{script}</body></html>\n"
    )
