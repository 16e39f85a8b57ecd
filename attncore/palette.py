"""The fonts and colours of pages, of plots, and of the pictures of the documents.

Ink, muted ink and the series are readable (a contrast of at least 4.5 to 1) on the paper of their scheme, ink on every
fill of it; tests/test_palette.py checks that.
"""

from __future__ import annotations

from typing import NamedTuple

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Scheme(NamedTuple):
    """Colours for one background, as CSS writes them."""

    paper: str
    ink: str
    muted: str
    """Of what is said beside."""
    line: str
    """Of arrows and edges."""
    rule: str
    """Of the lines of a table, and of a plot's scale."""
    series: tuple[str, ...]
    """Of lines and dots, in the order of use: blue, orange, green, purple, red."""
    more_series: tuple[str, ...]
    """Behind those of ``series``, for plots of more lines: as unlike them and each other as the contrast allows."""
    fills: tuple[str, ...]
    """Behind ink: grey, blue, orange, green, purple."""


LIGHT = Scheme(
    "#ffffff", "#1f2328", "#57606a", "#57606a", "#d8dee4",
    ("#0b5cad", "#9a4b00", "#1a7032", "#7a3fc4", "#b3261e"),
    ("#e10087", "#0000ff", "#3c2d2d", "#007887", "#690f5a", "#787800", "#a55a69", "#b400f0", "#3c3c00", "#004bff"),
    ("#eef1f4", "#d6e8fb", "#ffe3c7", "#d3f0da", "#eadffb"),
)  # fmt: skip
DARK = Scheme(
    "#0d1117", "#e6edf3", "#a8b1bd", "#a8b1bd", "#30363d",
    ("#6cb6ff", "#f0a35e", "#6bc980", "#c297ff", "#ff9a91"),
    ("#00f000", "#ff0000", "#ff00ff", "#e1e100", "#ff1e96", "#00f0ff", "#878787", "#788700", "#965aff", "#ff3c5a"),
    ("#21262d", "#12375c", "#55330f", "#14472a", "#3e2a66"),
)  # fmt: skip
FILLS = ("grey", "blue", "orange", "green", "purple")


def variables() -> str:
    """The colours as variables of CSS (``--ink``, ``--series-0``, ``--fill-blue``); those of DARK on request."""
    return f":root {{ {_declared(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_declared(DARK)} }} }}"


def _declared(scheme: Scheme) -> str:
    found = {name: getattr(scheme, name) for name in ("paper", "ink", "muted", "line", "rule")}
    found |= {f"series-{number}": colour for number, colour in enumerate(scheme.series + scheme.more_series)}
    found |= {f"fill-{name}": colour for name, colour in zip(FILLS, scheme.fills, strict=True)}
    return "; ".join(f"--{name}: {colour}" for name, colour in found.items())
