"""Objects as text for people: bounded, on lines of 80 columns, and never an exception.

An object's ``__repr__`` runs in debuggers, logs and error messages: it changes nothing, reads no device and waits for
nothing. What comes from outside (names of requests, texts of plugins) is shortened, and escaped in HTML.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar

from attncore.quoted import one_line, quoted

WIDTH = 80
_Self = TypeVar("_Self")


def guarded(describe: Callable[[_Self], str]) -> Callable[[_Self], str]:
    """``describe`` as a ``__repr__``: what it raises, as for an object that is half made, becomes text."""

    @wraps(describe)
    def text(self: _Self) -> str:
        try:
            return describe(self)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return f"<{type(self).__name__} at {id(self):#x}: not shown, {type(error).__name__}>"

    return text


def guarded_html(describe: Callable[[_Self], str]) -> Callable[[_Self], str]:
    """``describe`` as a ``_repr_html_``; where it raises, the ``repr`` as HTML."""

    @wraps(describe)
    def markup(self: _Self) -> str:
        try:
            return describe(self)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return preformatted(repr(self))

    return markup


def short(value: object, width: int = 24) -> str:
    """The ``repr`` of any value on one line of about ``width`` letters.

    Tensors are named by their type: printing one waits for its device.
    """
    if issubclass(type(value), getattr(sys.modules.get("torch"), "Tensor", ())):
        return f"<{type(value).__name__}>"
    return cut(quoted(value), 2 * width)


def cut(text: str, width: int) -> str:
    """``text``, shortened in its middle to ``width`` letters."""
    head = (width - 3) // 2
    return text if len(text) <= width else f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def some(values: Iterable[object], total: int | None = None, most: int = 6) -> str:
    """The first ``most`` of ``values`` in a sentence, and how many of ``total`` (None: of them all) are left out."""
    texts: list[str] = []
    count = 0
    for count, value in enumerate(values, 1):
        if count <= most:
            texts.append(str(value))
        elif total is not None:
            break
    more = (count if total is None else total) - len(texts)
    return ", ".join([*texts, *([f"... {more} more"] if more > 0 else [])]) or "none"


def counted(number: int, one: str, many: str = "", *, spec: str = "") -> str:
    """``1 request``, ``2 requests``; ``spec`` formats the number."""
    return f"{number:{spec}} {one if number == 1 else many or f'{one}s'}"


def angled(head: str, facts: Iterable[str]) -> str:
    """``<head: fact, fact>``, without control codes; lines after the first are indented by one."""
    lines = [f"<{cut(one_line(head), 60)}:"]
    for fact in (cut(one_line(fact), WIDTH - 4) for fact in facts if fact):
        if len(lines[-1]) + len(fact) + 2 > WIDTH:
            lines.append("")
        lines[-1] += f" {fact},"
    return "\n".join(lines)[:-1] + ">"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], width: int = WIDTH) -> str:
    """Columns under ``headers``; the last one wraps at ``width``, the others are as wide as they have to be."""
    import textwrap

    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers) - 1)]
    left = sum(widths) + 2 * len(widths)
    written = []
    for line in lines:
        first, *more = textwrap.wrap(line[-1], max(24, width - left)) or [""]
        cells = [cell.ljust(size) for cell, size in zip(line, widths, strict=False)]
        written.append("  ".join([*cells, first]).rstrip())
        written.extend(" " * left + part for part in more)
    return "\n".join(written)


def escaped(text: object) -> str:
    """``text`` as the content of an HTML element or of a quoted attribute."""
    import html

    return html.escape(str(text))


_MARKUP = re.compile(r"[\\`*\[\]~|]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown reads as more than a letter, beside what HTML does; an underscore is a letter within a word."""


def markdown_cell(text: str) -> str:
    """A line of text as a cell of a table of Markdown, which shows it as it is.

    Entities stand for what HTML reads, for not every Markdown escapes that by a backslash.
    """
    return _MARKUP.sub(r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def preformatted(text: str) -> str:
    """Lines of text as HTML."""
    return f"<pre>{escaped(text)}</pre>"


def html_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table; cells are text, but for those that are Markup."""
    cells = "".join(f"<th style='text-align:left'>{escaped(header)}</th>" for header in headers)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:left'>{cell if isinstance(cell, Markup) else escaped(cell)}</td>" for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


class Markup(str):
    """HTML that is escaped already."""

    __slots__ = ()
