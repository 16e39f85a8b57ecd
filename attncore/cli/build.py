"""Build the metadata of batches: reads one batch per line (JSON Lines) and writes its metadata as one line.

The first bad line ends the run: lines before it are answered, nothing after it is read, and standard error has one line
that begins with "line N:" and the field. The documents "api" and "list builder" of the repository describe the fields
and the lines. One line for a prompt of five tokens in blocks 4 and 6 is

{"block_size": 4, "groups": [{"is_prompt": true, "sequences": [{"seq_id": 0, "query_len": 5, "context_len": 0,
"block_table": [4, 6]}]}]}

With --groups, --speculative or --context-parallel the lines are steps of the persistent builder: "sequences" in place
of "groups", each with the blocks that it holds. A sequence that runs up to 1 + K tokens is a decode; decodes come first
in the answer.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, BinaryIO

from attncore.builder.lists.dialects import DIALECTS
from attncore.cli.argument_types import add_integer
from attncore.cli.persistent_builder_options import (
    GROUPS_METAVAR,
    Ranks,
    check_ranks,
    parse_drafts,
    parse_groups,
    parse_one_rank,
)
from attncore.cli.typed_input import say_that_it_reads
from attncore.command import InputLineError, UsageError
from attncore.input_files import GZIP, bounded_lines, standard_input
from attncore.json_lines.list_builder import build_batch, parse_batch
from attncore.json_lines.metadata_as_json import MAX_ANSWER
from attncore.json_output import json_text
from attncore.kernels import load_kernels


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="batches to read (default -: standard input)"
    )
    parser.add_argument(
        "--layout", choices=sorted(DIALECTS), default="common", help="whose fields to write (default %(default)s)"
    )
    parser.add_argument(
        "--kernels", choices=("cython", "numba"), help="implementation to use (default: cython where it is compiled)"
    )

    parser.add_argument(
        "--groups",
        type=parse_groups,
        metavar=GROUPS_METAVAR,
        help='KV-cache groups; a sequence has "block_tables" by name (example: full:16,window:16:1024)',
    )
    parser.add_argument(
        "--speculative",
        type=parse_drafts,
        metavar="K",
        help="decodes run up to K drafts beside their token",
    )
    add_integer(
        parser,
        "--max-answer",
        1,
        2**40,
        MAX_ANSWER,
        "of the longest answer; a line that asks for more is refused before memory is taken for it",
        metavar="BYTES",
    )
    parser.add_argument(
        "--context-parallel",
        type=parse_one_rank,
        metavar="WORLD:RANK[:INTERLEAVE]",
        help="answer for one of WORLD ranks that share out every sequence's tokens, INTERLEAVE (default 1) in turn; "
        "blocks hold the block size on each",
    )


def run(args: argparse.Namespace) -> int:
    """Answer every line; UsageError for an empty input, InputLineError for the first bad line."""
    answer = _answerer(args)
    load_kernels(args.kernels)  # before the first line, which an unavailable choice is no mistake of
    if args.file == "-":
        say_that_it_reads("build", "a batch (JSON) a line")
    with nullcontext(standard_input()) if args.file == "-" else _opened(args.file) as lines:
        name = "standard input" if args.file == "-" else args.file
        if not _answer_all(_numbered(name, lines, max(args.max_answer, MAX_ANSWER) // 4), answer):
            raise UsageError(f"{name} is empty; expected a batch (JSON) a line")
    return 0


def _opened(file: str) -> BinaryIO:
    try:
        return open(file, "rb")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error


def _answerer(args: argparse.Namespace) -> Callable[[bytes], dict[str, Any]]:
    """The function from a line to its answer: by the list builder, or with any of its options the persistent one."""
    if not (args.groups or args.speculative or args.context_parallel):
        return lambda line: build_batch(parse_batch(line), args.layout, args.kernels, args.max_answer)
    from attncore.json_lines.persistent_builder import StepOptions, build_step, parse_step

    if args.layout != "common":
        raise UsageError(
            f"--layout: {args.layout} given beside --groups, --speculative or --context-parallel, whose answers have "
            "the fields of every layout"
        )
    ranks = args.context_parallel or Ranks()
    if args.context_parallel and args.groups:
        check_ranks(ranks, args.groups)
    options = StepOptions(
        args.groups, 1 + (args.speculative or 0), ranks.world_size, ranks.rank, ranks.interleave, args.max_answer
    )
    return lambda line: build_step(parse_step(line, options), options, args.kernels)


def _numbered(name: str, stream: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers; InputLineError for one of more than ``most`` bytes, which is not read on.

    UsageError where the stream ``name`` is gzipped, or cannot be read: an error of a descriptor says not of which.
    """
    number = 0
    try:
        for number, line in enumerate(bounded_lines(stream, most), 1):
            if number == 1 and line.startswith(GZIP):
                file = "FILE" if name == "standard input" else shlex.quote(name)
                raise UsageError(f"{name} is gzipped; unpack it: gzip -dc {file} | attncore build -")
            yield number, line
    except UsageError:
        raise
    except ValueError as error:
        raise InputLineError(f"line {number + 1}: batch: {error}") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error


def _answer_all(lines: Iterable[tuple[int, bytes]], answer: Callable[[bytes], dict[str, Any]]) -> int:
    """Write the answer of each line that is not blank; returns their number."""
    answered = 0
    for number, line in lines:
        if not line.strip():
            continue
        try:
            metadata = answer(line)
        except (ValueError, TypeError, MemoryError) as error:
            raise InputLineError(f"line {number}: {str(error) or 'not enough memory'}") from error
        sys.stdout.write(json_text(metadata, separators=(", ", ": ")) + "\n")
        sys.stdout.flush()  # a program that reads this answer may wait for it before it sends the next line
        answered += 1
    return answered
