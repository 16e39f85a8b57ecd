"""What ``python -m attncore.testing`` does. pytest is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from attncore.command import Parser, UsageError, load_torch
from attncore.errors import NoBackendError
from attncore.how_to_install import missing_module
from attncore.json_output import json_text, print_json
from attncore.quoted import MOST, one_line, printable, quoted
from attncore.registry.plugins.option_argument import add_option_argument, options_of
from attncore.standard_output import Lent
from attncore.testing.device_option import check_device
from attncore.testing.harness.journal import FULL, Journal
from attncore.testing.harness.support_table import Report, identity

MAX_EXAMPLES = 10**6
_NONE_RAN = 5
"""pytest's exit code where it has collected no test."""
_MAX_LETTERS, _MAX_NESTED = 4000, 50
"""Letters of -k, and brackets and ``not`` in it: pytest reads them with a function that calls itself."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("name", metavar="NAME", help="the backend, as `attncore list` prints it")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--examples", type=int, default=40, metavar="N", help="batches a test draws (default 40)")
    parser.add_argument("--device", help="a torch device (default: the negotiation's)")
    add_option_argument(parser, "NAME")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests whose names match, as in pytest")


def parsed(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """What is given on the command line; SystemExit for --help."""
    parser = Parser(prog="python -m attncore.testing", description=description)
    configure(parser)
    parser.usage = "%(prog)s [OPTION ...] NAME"  # as of attncore's commands: the options are listed below it
    return parser.parse_args(argv)


def run(args: argparse.Namespace, journal: Journal | None = None, folder: Path | None = None) -> int:
    """Run the kit in this process; 1 where a test failed or the backend ended the run, 2 where none ran.

    ``journal`` and ``folder`` are those of ``conformance``.
    """
    if not 1 <= args.examples <= MAX_EXAMPLES:
        raise UsageError(f"--examples: {quoted(args.examples)} is not between 1 and {MAX_EXAMPLES}")
    try:
        _check_expression(args.k or "")
        load_torch(waiting=1 if journal is None else 2)  # the process that started this one hands each on once more
        from attncore.testing.harness.errors import UnsupportedError
        from attncore.testing.harness.run_suite import conformance
        from attncore.testing.harness.subject import Subject
    except ImportError as error:
        raise UsageError(missing_module(error, "test")) from error
    check_device(args.device)
    given = options_of(args.name, args.option, "NAME")
    subject = Subject(args.name, device=args.device, options=given)
    try:
        record = subject.record
    except UnsupportedError as error:  # a test file calls it BACKEND
        raise NoBackendError(str(error).replace("BACKEND", "NAME", 1)) from error
    if record.spec is not None and subject.refusals:
        raise NoBackendError("\n  ".join((f"{args.name} cannot run here:", *subject.refusals)))
    values = f"OPTIONS = json.loads({json_text(given)!r})"
    settings = f"import json\n\nEXAMPLES = {args.examples}\nDEVICE = {args.device!r}\n{values}\n"
    options = ["-q", "-rN", "--color=no", *([f"-k{args.k}"] if args.k else [])]
    with contextlib.redirect_stdout(_Printable(sys.stdout)):
        if journal is not None:
            journal.begin(Report(args.name, given, args.device, identity(args.name)))
            if journal.is_full:
                return FULL
        code, report = conformance(args.name, settings=settings, options=options, journal=journal, folder=folder)
    if journal is not None and journal.is_full:
        return FULL
    if code == _NONE_RAN and args.k:
        raise UsageError(f"-k: no test's name matches {quoted(args.k)}; they are such as test_decode, test_prefill")
    if args.json:
        print_json(report.as_json())
    return 0 if code == 0 else 1 if code == 1 else 2


def _check_expression(text: str) -> None:
    """UsageError for a -k that pytest cannot read, which it says in several lines."""
    from _pytest.mark.expression import Expression

    if len(text) > _MAX_LETTERS or len(re.findall(r"\(|\bnot\b", text)) > _MAX_NESTED:
        limits = f"longer than {_MAX_LETTERS} letters, or has more than {_MAX_NESTED} brackets and 'not'"
        raise UsageError(f"-k: {quoted(text)} is {limits}")
    try:
        if "=" in text:  # of a marker, which is read and then refused
            raise ValueError("'=' is of markers")
        Expression.compile(text)
    except Exception as error:  # a SyntaxError, or pytest 8's own
        why = one_line(getattr(error, "msg", error), MOST)
        words = f"{quoted(text)} is no expression such as 'test_decode and not sinks': {why}"
        raise UsageError(f"-k: {words}") from error


class _Printable(Lent):
    """A stream to which control codes are written escaped: pytest prints what a backend raises as it is."""

    def write(self, text: str) -> int:
        """Write text; its length."""
        self.own.write(printable(text))
        return len(text)
