"""Types of arguments for argparse: numbers within bounds, one of several words."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection
from pathlib import Path

from attncore.arguments import real_number, whole_number
from attncore.quoted import quoted


def add_integer(
    parser: argparse._ActionsContainer,
    name: str,
    low: int,
    high: int,
    default: int,
    text: str,
    metavar: str = "N",
) -> None:
    """An option that takes an integer from ``low`` to ``high``; its help is ``text`` and the default."""
    parser.add_argument(
        name, type=integer(low, high), default=default, metavar=metavar, help=f"{text} (default {default})"
    )


def add_choice(parser: argparse._ActionsContainer, name: str, choices: Collection[str], text: str) -> None:
    """An option that takes one of ``choices``; its help is ``text`` and the choices, so that these can be wrapped."""
    metavar = name.rpartition("-")[2].upper()
    parser.add_argument(name, choices=choices, metavar=metavar, help=f"{text}: {', '.join(choices)}")


def integer(low: int, high: int) -> Callable[[str], int]:
    """The type of an integer from ``low`` to ``high``."""
    return lambda text: parse_integer(text, low, high)


def number(low: float, high: float, name: str = "") -> Callable[[str], float]:
    """The type of a number from ``low`` to ``high``; the ArgumentTypeError begins with ``name`` where it is given."""
    subject = f"{name} " if name else ""

    def parse(text: str) -> float:
        try:
            value = real_number(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{subject}{error}") from None
        if not low <= value <= high:  # NaN neither
            raise argparse.ArgumentTypeError(f"{subject}{value:g} is not between {low:g} and {high:g}")
        return value

    return parse


def parse_integer(text: str, low: int, high: int, name: str = "") -> int:
    """``text`` as an integer from ``low`` to ``high``; the ArgumentTypeError begins with ``name`` where it is given."""
    subject = f"{name} " if name else ""
    try:
        value = whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{subject}{error}") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{subject}{quoted(value)} is not between {low} and {high}")
    return value


def backend_name(text: str) -> str:
    """The type of a backend's name, by which ``completion`` knows that a shell is to offer those installed."""
    return _given(text)


def _given(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' is empty; give a value")
    return text


def backend_names(text: str) -> tuple[str, ...]:
    """The type of names of backends, with commas between them; completed like one."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{quoted(text)} names no backend; give names with commas between them")
    return names


def file_path(text: str) -> Path:
    """The type of a file that is read; a path that ends like a folder's is none of a file, which Path would drop."""
    if text and os.path.basename(text) in ("", "."):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is the name of a folder; give a file")
    return Path(_given(text))
