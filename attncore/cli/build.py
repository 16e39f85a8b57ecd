"""Build the metadata of batches: one batch a line (JSON Lines) in, its metadata out, line by line.

The first bad line ends the run: lines before it are answered, nothing after it is read, and standard error has one line
that begins with "line N:" and the field. docs/api.md describes the fields.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext

from attncore.builder.batch_file import build_batch, parse_batch
from attncore.builder.layouts import LAYOUTS
from attncore.cli import InputLineError, UsageError
from attncore.slots import load_kernels

HELP = "read batches (JSON Lines), write their metadata"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="batches to read (default -: standard input)"
    )
    parser.add_argument(
        "--layout", choices=sorted(LAYOUTS), default="common", help="whose fields to write (default %(default)s)"
    )
    parser.add_argument(
        "--kernels", choices=("cython", "numba"), help="implementation to use (default: cython where it is compiled)"
    )


def run(args: argparse.Namespace) -> int:
    load_kernels(args.kernels)  # a choice that cannot be had is no fault of the first line
    with nullcontext(sys.stdin.buffer) if args.file == "-" else open(args.file, "rb") as lines:
        if not _answer(lines, args):
            raise UsageError("FILE: empty; expected a batch a line" if args.file == "-" else f"{args.file}: empty")
    return 0


def _answer(lines: Iterable[bytes], args: argparse.Namespace) -> int:
    answered = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            metadata = build_batch(parse_batch(line), args.layout, args.kernels)
        except (ValueError, TypeError, MemoryError) as error:
            raise InputLineError(f"line {number}: {error}") from error
        sys.stdout.write(json.dumps(metadata, separators=(", ", ": ")) + "\n")
        sys.stdout.flush()  # a program at the other end waits for this answer before it asks again
        answered += 1
    return answered
