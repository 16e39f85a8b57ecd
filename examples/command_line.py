"""What the command lines of the examples have in common: a model, and where to listen."""

from __future__ import annotations

import argparse
from pathlib import Path


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
