"""Mends finished pages: what Sphinx and the theme write that a reader without a mouse or a screen stumbles over."""

import pathlib
import re

MENDED = (
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Pages">'),
    ('<aside class="toc-drawer', '<aside aria-label="On this page" class="toc-drawer'),
    ("<pre>", '<pre tabindex="0">'),  # wide ones are scrolled, by the keyboard too
    ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    ('<th class="head"><p></p></th>', '<td class="head"></td>'),  # the corner of a table
)
PARAMETERS = re.compile(r'<dl>\s*(<dd><em class="sig-param">.*?)</dl>', re.DOTALL)


def mended(page):
    """``page`` of HTML; a second call changes nothing."""
    for found, better in MENDED:
        page = page.replace(found, better)
    return PARAMETERS.sub(parameters, page)


def parameters(match):
    """A long signature's parameters, a line each: a list of definitions has terms, and these are none."""
    lines = match[1].replace("<dd>", '<div class="sig-line">').replace("</dd>", "</div>")
    return f'<div class="sig-lines">{lines}</div>'


def finish(app, failed):
    """Sphinx's event ``build-finished``."""
    if failed is None and app.builder.format == "html":
        for page in pathlib.Path(app.outdir).rglob("*.html"):
            before = page.read_text(encoding="utf-8")
            if (after := mended(before)) != before:
                page.write_text(after, encoding="utf-8")


def setup(app):
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
