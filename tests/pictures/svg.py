"""Pictures of the documents: SVG with text as text, alone in its file, for light and dark pages.

A picture brings its own paper, so that it is readable on any page. A text that has no room is an error: its width is
estimated for a wide font.
"""

from xml.sax.saxutils import escape

from attncore.palette import DARK, FILLS, FONT, LIGHT, MONO

WIDE = {"mono": 0.61, "bold": 0.64}
"""Width of a letter on average, in sizes of the font; 0.58 for other texts."""


class Picture:
    """What is drawn, in pixels at its natural size; ``title`` and ``desc`` are read to those who do not see it."""

    def __init__(self, width, height, title, desc):
        self.width, self.height, self.title, self.desc = width, height, title, desc
        self.parts = []

    def rect(self, x, y, width, height, kind="fill-grey", radius=5):
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"/>'
        )

    def text(self, x, y, text, kind="", *, size=13, anchor="start", room=None):
        """``room``: pixels that it may take; without it, those up to the picture's edge."""
        left = x if anchor == "start" else self.width - x if anchor == "end" else 2 * min(x, self.width - x)
        room = (self.width - left if anchor != "middle" else left) if room is None else room
        if (wide := width_of(text, kind, size)) > room:
            raise ValueError(f"{text!r} takes {wide:.0f} of {room:.0f} pixels")
        told = f' class="{kind}"' if kind else ""
        self.parts.append(
            f'<text{told} x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x, y, width, height, lines, fill="grey", first="bold", size=13):
        """A rectangle with lines of text in its middle; the first one is of the kind ``first``."""
        self.rect(x, y, width, height, f"fill-{fill} edge")
        step = size + 5
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.35
        for number, line in enumerate(lines):
            kind, of = (first, size) if number == 0 else ("", size - 1)
            self.text(x + width / 2, top + number * step, line, kind, size=of, anchor="middle", room=width - 8)

    def line(self, *points, kind="line"):
        drawn = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{drawn}"/>')

    def arrow(self, *points, both=False):
        """A line with a head at its end, and with ``both`` at its start."""
        self.line(*points)
        self._head(points[-2], points[-1])
        if both:
            self._head(points[1], points[0])

    def _head(self, start, end):
        length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
        dx, dy = (end[0] - start[0]) / length, (end[1] - start[1]) / length
        back = (end[0] - 9 * dx, end[1] - 9 * dy)
        corners = (end, (back[0] - 4.5 * dy, back[1] + 4.5 * dx), (back[0] + 4.5 * dy, back[1] - 4.5 * dx))
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.parts.append(f'<polygon class="head" points="{drawn}"/>')

    def dot(self, x, y, kind):
        self.parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')

    def drawn(self):
        """The file's text."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-labelledby="title desc">\n'
            f'<title id="title">{escape(self.title)}</title>\n<desc id="desc">{escape(self.desc)}</desc>\n'
            f"<style>\n{STYLE}\n</style>\n"
            f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def width_of(text, kind, size):
    """Pixels that a text takes at most, about."""
    return len(text) * size * next((wide for word, wide in WIDE.items() if word in kind.split()), 0.58)


def _colours(scheme):
    rules = [
        f".paper {{ fill: {scheme.paper} }}",
        f"text {{ fill: {scheme.ink} }}",
        f".muted {{ fill: {scheme.muted} }}",
        f".edge {{ stroke: {scheme.line} }}",
        f".line {{ stroke: {scheme.line} }}",
        f".rule {{ stroke: {scheme.rule} }}",
        f".head {{ fill: {scheme.line} }}",
    ]
    rules += [f".fill-{name} {{ fill: {colour} }}" for name, colour in zip(FILLS, scheme.fills, strict=True)]
    for number, colour in enumerate(scheme.series):
        rules += [f".series-{number} {{ stroke: {colour} }}", f".of-{number} {{ fill: {colour} }}"]
    return "\n".join(rules)


STYLE = f"""text {{ font-family: {FONT} }}
.mono {{ font-family: {MONO} }}
.bold {{ font-weight: 600 }}
.line, .rule, .series {{ fill: none; stroke-width: 1.5 }}
.rule {{ stroke-width: 1 }}
.series {{ stroke-width: 2.5 }}
.dashed {{ stroke-dasharray: 5 4 }}
{_colours(LIGHT)}
@media (prefers-color-scheme: dark) {{
{_colours(DARK)}
}}"""
