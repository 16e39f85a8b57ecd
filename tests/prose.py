"""Prose of the documents, at most 120 columns wide: what is wider. Run as a program with --write, it fills it anew."""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 120
MARK = re.compile(r" *(?:[-*]|\d+\.) +")
SPAN = re.compile(r"`[^`]{1,60}`")  # code in a sentence is not broken
FREE = re.compile(r"\s*[|<#]|\[[^]]+\]: ")  # tables, markup, headings, the addresses of links


def documents():
    """Every document of the repository, less those of folders that are not of it."""
    for folder in (ROOT, ROOT / "docs", ROOT / "plugins", ROOT / "attncore", ROOT / "examples"):
        pattern = "*.md" if folder == ROOT else "**/*.md"
        yield from (file for file in sorted(folder.glob(pattern)) if ".venv" not in file.parts)


def paragraphs(lines):
    """(first line, behind the last) of every paragraph and item of a list; code, tables and headings are none."""
    start, fenced = None, False
    for at, line in enumerate([*lines, ""]):
        fence = line.lstrip().startswith("```")
        item = MARK.match(line)
        code = line.startswith("    ") and (start is None or not MARK.match(lines[start]))
        ends = fenced or fence or code or not line.strip() or bool(FREE.match(line))
        if start is not None and (ends or item):
            yield start, at
            start = None
        fenced ^= fence
        if start is None and not ends:
            start = at


def too_wide(lines):
    """The paragraphs that have a line wider than WIDTH, and a space in it to break at."""
    for start, end in paragraphs(lines):
        if any(len(line) > WIDTH and " " in line.strip()[: WIDTH - 2] for line in lines[start:end]):
            yield start, end


def filled(lines):
    """``lines`` with those paragraphs filled."""
    made, last = [], 0
    for start, end in too_wide(lines):
        mark = MARK.match(lines[start])
        indent = " " * (len(mark[0]) if mark else len(lines[start]) - len(lines[start].lstrip()))
        first = mark[0] if mark else indent
        text = " ".join(line.strip() for line in lines[start:end]).removeprefix(first.strip()).strip()
        made += lines[last:start]
        whole = SPAN.sub(lambda span: span[0].replace(" ", "\0"), text)
        broken = textwrap.wrap(
            whole, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        made += [line.replace("\0", " ") for line in broken]
        last = end
    return [*made, *lines[last:]]


if __name__ == "__main__":
    for file in documents():
        before = file.read_text(encoding="utf-8").split("\n")
        if (after := filled(before)) != before:
            print(file.relative_to(ROOT))
            if "--write" in sys.argv:
                file.write_text("\n".join(after), encoding="utf-8")
