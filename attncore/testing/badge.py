"""A row of Markdown, and a badge, of what `python -m attncore.testing NAME --json` has written.

FILE is that output, `-` standard input; the rows of several files make a table of backends. The badge is an SVG of its
own, which asks no service of anybody. pytest and torch are not imported. Texts of FILE are shown as they are: Markdown
and HTML in them mean nothing.
"""

from __future__ import annotations

import sys

from attncore.interrupts import as_program
from attncore.search_path import without_current_folder

TYPE_CHECKING = False  # an interrupt has an answer once the few modules above are imported
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

HEADERS = ("backend", "from", "attncore", "device", "supported", "unsupported", "failed")
LABEL = "attncore kit"
_MOST, _DEPTH = 1 << 22, 8
_REMEDY = "write it by `python -m attncore.testing NAME --json`"
_LETTER, _MARGIN = 7, 6
"""Pixels that a letter takes at most in 11 pixels of Verdana, and on either side of a text."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    from attncore.command import Parser, run_command

    def command() -> int:
        parser = Parser(prog="python -m attncore.testing.badge", description=__doc__)
        parser.add_argument("files", metavar="FILE", nargs="+", help="what the kit has written with --json")
        parser.add_argument("--svg", metavar="FILE", help="write a badge to it, as the one FILE says")
        try:
            args = parser.parse_args(argv)
        except SystemExit as ended:  # --help
            return int(ended.code or 0)
        return _run(args)

    return run_command(command, to_the_end=argv is None)


def _run(args: argparse.Namespace) -> int:
    from attncore.command import UsageError
    from attncore.written_file import check_written_file

    if args.svg is not None and len(args.files) > 1:
        raise UsageError("--svg: a badge is of one FILE")
    if args.files.count("-") > 1:
        raise UsageError("FILE: '-' is given twice, and standard input can be read once")
    if args.svg is not None:
        check_written_file("--svg", args.svg, {"FILE itself": args.files[0]})
    tables = [read_table(name) for name in args.files]
    if args.svg is not None:  # first: where it cannot be written, nothing is printed
        from attncore.replay.results.whole_file import WholeFile

        with WholeFile(args.svg) as file:  # whose errors name it
            file.write(svg(tables[0]))
    for line in (HEADERS, ("---",) * len(HEADERS), *map(row, tables)):
        print(f"| {' | '.join(line)} |")
    return 0


def read_table(name: str) -> Mapping[str, Any]:
    """The kit's table in a file (``-``: standard input); UsageError that names the file where it is none."""
    from attncore.command import UsageError
    from attncore.input_files import parse_json, read_file, standard_input

    try:
        data = standard_input().read(_MOST + 1) if name == "-" else read_file(name, _MOST)
        if len(data) > _MOST:
            raise ValueError(f"is longer than {_MOST} bytes")
        found = parse_json(data, _DEPTH, _REMEDY)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{name} {error}") from error
    if problem := _problem(found):
        raise UsageError(f"{name}: {problem}; {_REMEDY}")
    return dict(found)


def _problem(found: Any) -> str:
    """What is wrong with a table, empty where nothing is."""
    from attncore.quoted import quoted_json

    if not isinstance(found, dict):
        return f"{quoted_json(found)} is no table of the kit"
    for field in ("backend", "distribution", "version", "attncore", "device"):
        if not isinstance(found.get(field), str):
            return f"{field}: {quoted_json(found.get(field))} is not a text"
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(
        isinstance(one, dict) and isinstance(one.get("capability"), str) and isinstance(one.get("state"), str)
        for one in rows
    ):
        return f"rows: {quoted_json(rows)} are no rows with capability and state"
    return ""


def row(table: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells under HEADERS, as Markdown."""
    from attncore.quoted import one_line
    from attncore.show import markdown_cell

    source = f"{table['distribution']} {table['version']}".strip()
    device = str(table.get("device_name") or table["device"])
    options = table.get("options")
    given = ", ".join(f"{name}={value}" for name, value in options.items()) if isinstance(options, dict) else ""
    name = f"{table['backend']} ({given})" if given else str(table["backend"])
    states = (_with(table, "supported"), _with(table, "unsupported"), _failed(table))
    cells = (name, source, str(table["attncore"]), device, *(", ".join(names) or "-" for names in states))
    return tuple(markdown_cell(one_line(cell)) for cell in cells)


def svg(table: Mapping[str, Any]) -> str:
    """The badge: how many capabilities are supported, or how many failed."""
    from attncore.quoted import one_line
    from attncore.show import escaped

    failed, supported = len(_failed(table)), len(_with(table, "supported"))
    message = f"{failed} failed" if failed else f"{supported} supported"
    color = "#c62828" if failed or not supported else "#2e7d32"
    left, right = (len(text) * _LETTER + 2 * _MARGIN for text in (LABEL, message))
    title = f"{LABEL} of {one_line(table['backend'])}: {message}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">'
        f"<title>{escaped(title)}</title>"
        f'<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="{color}"/>'
        '<g fill="#fff" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2:g}" y="14">{escaped(LABEL)}</text>'
        f'<text x="{left + right / 2:g}" y="14">{escaped(message)}</text></g></svg>\n'
    )


def _with(table: Mapping[str, Any], *states: str) -> list[str]:
    return [str(one["capability"]) for one in table["rows"] if one["state"] in states]


def _failed(table: Mapping[str, Any]) -> list[str]:
    return _with(table, "failed", "not run", "expected failure")


def _load() -> Callable[[], int]:
    import attncore.command  # loaded while an interrupt needs no answer
    import attncore.input_files  # noqa: F401

    return main


if __name__ == "__main__":
    sys.path[:] = without_current_folder()
    raise SystemExit(as_program(_load))
