"""Types of options for argparse: numbers within bounds, and the clock of a replay."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from attncore.replay.scheduling.clock import CostModel

if TYPE_CHECKING:
    from collections.abc import Callable


def integer_option(
    parser: argparse.ArgumentParser, name: str, low: int, high: int, default: int, text: str, metavar: str = "N"
) -> None:
    parser.add_argument(
        name, type=integer(low, high), default=default, metavar=metavar, help=f"{text} (default {default})"
    )


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None
        if not low <= value <= high:  # NaN neither
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    return parse


def clock(text: str) -> CostModel:
    try:
        return CostModel.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("clock: ")) from None
