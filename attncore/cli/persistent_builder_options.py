"""Types of the options that ``replay`` and ``build`` share: KV-cache groups, drafts, context-parallel ranks."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from attncore.builder.persistent.kv_cache_group import KVCacheGroup, checked_groups
from attncore.cli.argument_types import parse_integer
from attncore.command import UsageError
from attncore.quoted import quoted
from attncore.show import counted

MAX_BLOCK_SIZE, MAX_WINDOW, MAX_DRAFTS, MAX_RANKS = 2**20, 2**31 - 1, 1023, 1024
GROUPS_METAVAR = "NAME:BLOCK_SIZE[:WINDOW],..."


class Ranks(NamedTuple):
    """A group of context-parallel ranks, and one of them (0 where all are meant)."""

    world_size: int = 1
    interleave: int = 1
    rank: int = 0


def parse_groups(text: str) -> tuple[KVCacheGroup, ...]:
    """``full:16,window:16:1024``: name, tokens per block, sliding window in tokens."""
    parsed = []
    for part in text.split(","):
        name, *numbers = (word.strip() for word in part.split(":"))
        if not name or len(numbers) not in (1, 2):
            raise argparse.ArgumentTypeError(f"{part[:40]!r} is not NAME:BLOCK_SIZE or NAME:BLOCK_SIZE:WINDOW")
        if not name.isprintable():  # it is part of reports and of errors
            raise argparse.ArgumentTypeError(f"{quoted(name)} has letters that cannot be printed; give another name")
        block_size = parse_integer(numbers[0], 1, MAX_BLOCK_SIZE, f"block size of {name}")
        window = parse_integer(numbers[1], 1, MAX_WINDOW, f"window of {name}") if len(numbers) == 2 else None
        parsed.append(KVCacheGroup(name, block_size, sliding_window=window))
    try:
        return checked_groups(parsed)[0]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def group_text(group: KVCacheGroup) -> str:
    """A group as the option states it."""
    window = "" if group.sliding_window is None else f":{group.sliding_window}"
    return f"{group.name}:{group.block_size}{window}"


def parse_drafts(text: str) -> int:
    """``3``: the most drafts of a decode."""
    return parse_integer(text, 1, MAX_DRAFTS, "K")


def parse_one_rank(text: str) -> Ranks:
    """``2:0`` or ``2:0:4``: number of ranks, which of them, and tokens that each takes in turn."""
    world, *rest = text.split(":")
    if len(rest) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not WORLD:RANK or WORLD:RANK:INTERLEAVE")
    world_size = parse_integer(world, 1, MAX_RANKS, "WORLD")
    rank = parse_integer(rest[0], 0, world_size - 1, "RANK")
    return Ranks(world_size, parse_integer(rest[1], 1, MAX_BLOCK_SIZE, "INTERLEAVE") if len(rest) == 2 else 1, rank)


def check_ranks(ranks: Ranks, groups: tuple[KVCacheGroup, ...]) -> None:
    """UsageError where ranks cannot share the keys of these groups, whose block sizes are those on one rank."""
    for group in groups:
        if group.sliding_window is not None:
            raise UsageError(
                f"--context-parallel: group {group.name!r} of --groups has a sliding window; ranks share out "
                "whole contexts only"
            )
        if group.block_size != groups[0].block_size:
            raise UsageError(
                f"--context-parallel: groups {groups[0].name!r} and {group.name!r} of --groups have blocks of "
                f"{groups[0].block_size} and {counted(group.block_size, 'token')}; ranks share out blocks of one size"
            )
        if group.block_size % ranks.interleave:
            raise UsageError(
                f"--context-parallel: INTERLEAVE {ranks.interleave} does not divide the block size {group.block_size}"
            )
