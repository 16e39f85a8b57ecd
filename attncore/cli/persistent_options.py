"""Options that ``replay`` and ``build`` share: KV-cache groups, drafts, context parallelism. Types for argparse."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from attncore.builder.persistent.kv_cache_group import KVCacheGroup, checked_groups
from attncore.cli import UsageError
from attncore.cli.argument_types import number
from attncore.replay.scheduling.draft_model import DEFAULT_ACCEPTANCE, Speculation

MAX_BLOCK_SIZE, MAX_WINDOW, MAX_DRAFTS, MAX_RANKS = 2**20, 2**31 - 1, 1023, 1024
GROUPS_METAVAR = "NAME:BLOCK_SIZE[:WINDOW],..."


class Ranks(NamedTuple):
    """A context-parallel group. ``rank`` is 0 where all of them are meant."""

    world_size: int = 1
    interleave: int = 1
    rank: int = 0


def add_to_replay(parser: argparse.ArgumentParser) -> None:
    """The three options, as ``replay`` has them."""
    parser.add_argument(
        "--groups",
        type=groups,
        metavar=GROUPS_METAVAR,
        help="KV-cache groups, each with --num-blocks blocks of its own; layers are dealt among them in turn, blocks "
        "that a window has passed are given up (example: full:16,window:16:1024)",
    )
    parser.add_argument(
        "--speculative",
        type=speculation,
        metavar="K[:ACCEPT]",
        help="decodes run up to K drafts beside their token, each accepted, where all before it were, with probability "
        f"ACCEPT (default {DEFAULT_ACCEPTANCE}); the others are rolled back",
    )
    parser.add_argument(
        "--context-parallel",
        type=ranks,
        metavar="WORLD[:INTERLEAVE]",
        help="WORLD ranks share out the tokens of every request, INTERLEAVE (default 1) in turn; blocks hold "
        "--block-size tokens on each",
    )


def groups(text: str) -> tuple[KVCacheGroup, ...]:
    """``full:16,window:16:1024``: name, tokens a block holds, sliding window."""
    found = []
    for part in text.split(","):
        name, *numbers = (word.strip() for word in part.split(":"))
        if not name or len(numbers) not in (1, 2):
            raise argparse.ArgumentTypeError(f"{part[:40]!r} is not NAME:BLOCK_SIZE or NAME:BLOCK_SIZE:WINDOW")
        block_size = _number(f"block size of {name}", numbers[0], 1, MAX_BLOCK_SIZE)
        window = _number(f"window of {name}", numbers[1], 1, MAX_WINDOW) if len(numbers) == 2 else None
        found.append(KVCacheGroup(name, block_size, sliding_window=window))
    try:
        return checked_groups(found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def group_text(group: KVCacheGroup) -> str:
    """A group as the option states it."""
    window = "" if group.sliding_window is None else f":{group.sliding_window}"
    return f"{group.name}:{group.block_size}{window}"


def drafts(text: str) -> int:
    """``3``: drafts of a decode, at most."""
    return _number("K", text, 1, MAX_DRAFTS)


def speculation(text: str) -> Speculation:
    """``3`` or ``3:0.8``: drafts of a decode, at most, and how probably each is accepted."""
    count, colon, acceptance = text.partition(":")
    num_drafts = drafts(count)
    return Speculation(num_drafts, number(0, 1)(acceptance)) if colon else Speculation(num_drafts)


def ranks(text: str) -> Ranks:
    """``2`` or ``2:4``: how many ranks, and how many tokens in turn."""
    world, *rest = text.split(":")
    if len(rest) > 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not WORLD or WORLD:INTERLEAVE")
    world_size = _number("WORLD", world, 2, MAX_RANKS)
    return Ranks(world_size, _number("INTERLEAVE", rest[0], 1, MAX_BLOCK_SIZE) if rest else 1)


def one_rank(text: str) -> Ranks:
    """``2:0`` or ``2:0:4``: how many ranks, which of them, and how many tokens in turn."""
    world, *rest = text.split(":")
    if len(rest) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not WORLD:RANK or WORLD:RANK:INTERLEAVE")
    world_size = _number("WORLD", world, 1, MAX_RANKS)
    rank = _number("RANK", rest[0], 0, world_size - 1)
    return Ranks(world_size, _number("INTERLEAVE", rest[1], 1, MAX_BLOCK_SIZE) if len(rest) == 2 else 1, rank)


def check_ranks(found: Ranks, of_groups: tuple[KVCacheGroup, ...]) -> None:
    """A UsageError where ranks cannot share out the keys of these groups, whose blocks are those of one rank."""
    for group in of_groups:
        if group.sliding_window is not None:
            raise UsageError(
                f"--context-parallel: group {group.name!r} of --groups has a sliding window; ranks share out whole "
                "contexts only"
            )
        if group.block_size != of_groups[0].block_size:
            raise UsageError(
                f"--context-parallel: groups {of_groups[0].name!r} and {group.name!r} of --groups have blocks of "
                f"{of_groups[0].block_size} and {group.block_size} tokens; ranks share out blocks of one size"
            )
        if group.block_size % found.interleave:
            raise UsageError(
                f"--context-parallel: INTERLEAVE {found.interleave} does not divide the block size {group.block_size}"
            )


def _number(name: str, text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name} {text[:40]!r} is not a whole number") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{name} {value} is not between {low} and {high}")
    return value
