"""Run the conformance kit on an installed backend and print its support table.

Exits with 0 where everything declared works, 1 where a test failed, 2 for bad usage, 3 where the backend cannot run
here.
"""

from __future__ import annotations

import sys

from attncore.search_path import without_current_folder

if __name__ == "__main__":
    sys.path[:] = without_current_folder()

import argparse
import contextlib
import json

from attncore.standard_output import own_streams
from attncore.testing.harness.errors import UnsupportedError


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    with own_streams(to_the_end=argv is None):
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attncore.testing", description=__doc__)
    parser.add_argument("name", help="the backend, as `attncore list` prints it")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--examples", type=int, default=40, metavar="N", help="batches a test draws (default 40)")
    parser.add_argument("--device", help="a torch device (default: the negotiation's)")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests whose names match, as in pytest")
    args = parser.parse_args(argv)
    try:
        from attncore.testing.harness.run_suite import conformance
        from attncore.testing.harness.subject import Subject

        subject = Subject(args.name, device=args.device)
        if subject.record.spec is not None and subject.refusal:
            print(f"attncore: error: {args.name} cannot run here: {subject.refusal}", file=sys.stderr)
            return 3
    except ImportError as error:
        print(f"attncore: error: {error}; pip install 'attncore[test]'", file=sys.stderr)
        return 2
    except (UnsupportedError, ValueError) as error:
        print(f"attncore: error: {error}", file=sys.stderr)
        return 2
    settings = f"EXAMPLES = {args.examples}\nDEVICE = {args.device!r}\n"
    options = ["-q", *(["-k", args.k] if args.k else [])]
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        code, report = conformance(args.name, settings=settings, options=options)
    if args.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    return 0 if code == 0 else 1 if code == 1 else 2


if __name__ == "__main__":
    sys.exit(main())
