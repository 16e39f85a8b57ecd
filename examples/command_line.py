"""What the command lines of the examples have in common: a model, and where to listen."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path


class Formatter(argparse.HelpFormatter):
    """Help of paragraphs, filled to the terminal's width; commands to copy stay whole."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(one if one.startswith(_COMMANDS) else textwrap.fill(one, width) for one in paragraphs)


_COMMANDS = ("python ", "torchrun ", "curl ")


def add_model(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """The argument MODEL: a folder, or a name of Hugging Face's hub."""
    parser.add_argument(
        "model",
        nargs=nargs,
        type=model,
        metavar="MODEL",
        help="a folder with a model and its tokenizer; what is no folder is a name, which transformers fetches",
    )


def add_address(parser: argparse.ArgumentParser, default: int) -> None:
    """The options --host and --port."""
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default %(default)s)")
    parser.add_argument("--port", type=port, default=default, help="0: any that is free (default %(default)s)")


def model(text: str) -> str:
    """The text; ArgumentTypeError where it can only be a folder, and there is none: transformers would read a name."""
    if (text[:1] in "/.~" or text.count("/") > 1) and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return text


def port(text: str) -> int:
    """The number of a port; ArgumentTypeError where it is none."""
    if not text.isascii() or not text.isdigit() or int(text[:6]) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 0 to 65535")
    return int(text)


def asked_of_ranks(description: str | None) -> argparse.Namespace:
    """What is given on the command line of ranks.py; SystemExit for --help."""
    parser = argparse.ArgumentParser(
        usage="torchrun --nproc-per-node N examples/ranks.py [-h] [--share-keys]\n         MODEL [WORD ...]",
        description=description,
        formatter_class=Formatter,
    )
    add_model(parser)
    parser.add_argument("words", nargs="*", default=(), metavar="WORD", help="the text (default: Once upon a time)")
    parser.add_argument(
        "--share-keys",
        action="store_true",
        help="each rank has the whole model, and a part of every request's keys and values: context parallelism",
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit("command_line.py is a module; run generate.py beside it")
