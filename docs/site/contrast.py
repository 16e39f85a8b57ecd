"""The contrast of texts on the site, by WCAG 2: at least 4.5 to 1 in both schemes, for the theme's colours and those of
highlighted code. tests/test_palette.py holds the same of our own colours."""

import re

LEAST = 4.5
PAIRS = {
    "background-primary": ("foreground-primary", "foreground-secondary", "foreground-muted", "link", "link--visited",
                           "toc-item-text", "toc-item-text--active", "toc-title-text", "api-name", "api-keyword"),
    "sidebar-background": ("sidebar-link-text", "sidebar-link-text--top-level", "sidebar-caption-text",
                           "sidebar-brand-text"),
    "table-header-background": ("foreground-primary",),
    "inline-code-background": ("foreground-primary", "link"),
    "sidebar-search-background": ("sidebar-search-text",),
    "highlighted-background": ("highlighted-text",),
}  # fmt: skip
"""Backgrounds of the theme, and what is written on them."""


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def problems(static):
    """Of a built site's folder of styles: a line for each text that cannot be read."""
    theme = (static / "styles" / "furo.css").read_text(encoding="utf-8")
    code = (static / "pygments.css").read_text(encoding="utf-8")
    light = declared(theme, "body")
    for scheme, colours, prefix in (
        ("light", light, ""),
        ("dark", light | declared(theme, "body[data-theme=dark]"), 'body[data-theme="dark"] '),
    ):
        pairs = [(f"{text} on {on}", colour(colours, text), colour(colours, on)) for on in PAIRS for text in PAIRS[on]]
        pairs += highlighted(code, prefix)
        yield from (f"{scheme}: {what}: {found:.2f} to 1" for what, a, b in pairs if (found := contrast(a, b)) < LEAST)


def declared(css, selector):
    """The theme's variables --color-... of one selector."""
    blocks = re.findall(rf"(?<![^{{}};,]){re.escape(selector)}\{{([^{{}}]*)", css)
    return dict(re.findall(r"--color-([\w-]+):\s*([^;{}]*)", ";".join(blocks)))


def colour(colours, name):
    while reference := re.fullmatch(r"var\(\s*--color-([\w-]+)\s*\)", colours[name]):
        name = reference[1]
    return colours[name]


def highlighted(css, prefix):
    """The colours of highlighted code: what each is of, itself, and what is behind it."""
    rules = re.findall(rf"^{re.escape(prefix)}\.highlight( \.\w+)? \{{([^}}]*)\}}", css, re.MULTILINE)
    found = {name: dict(re.findall(r"(color|background(?:-color)?):\s*(#\w+)", rule)) for name, rule in rules}
    behind = found[""]["background"]
    return [
        (f"highlight{name}", of["color"], of.get("background-color", behind))
        for name, of in found.items()
        if "color" in of and name != " .w"  # white space
    ]
