"""The batches that every way is timed on, the same for all of them."""

import random
from collections.abc import Sequence
from typing import NamedTuple

BLOCK_SIZE = 16
DECODES = (1, 8, 32, 128, 256, 512, 1024)
PREFILLS = ((1, 8192), (8, 1024), (32, 256))
SAME_SIZES = (16,) * 8
OTHER_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
ODD_SIZES = (8, 16, 24, 32, 48, 64, 96, 128)
MIXED = (128, 2048)  # decodes beside one chunk of a prompt
STEPS = 16_384  # how far a timed decode batch may run before its blocks end
LONG = 131_072


class Row(NamedTuple):
    blocks: list[int]
    computed: int
    query_len: int = 1


def decodes(n: int, contexts: tuple[int, int] = (1024, 8191), headroom: int = STEPS) -> list[Row]:
    """n decodes with contexts uniform between the two, and blocks for ``headroom`` more steps."""
    rng = random.Random(20261120)
    rows, block = [], 1
    for _ in range(n):
        context = rng.randint(*contexts)
        count = (context + headroom) // BLOCK_SIZE + 1
        rows.append(Row(list(range(block, block + count)), context))
        block += count
    return rows


def in_groups(rows: list[Row], block_sizes: Sequence[int], headroom: int = STEPS) -> list[list[list[int]]]:
    """Block ids of each row in groups of these block sizes, with the room that the rows have."""
    blocks = []
    for index, row in enumerate(rows):
        of_row = []
        for size in block_sizes:
            count = (row.computed + headroom) // size + 1
            first = 1 + index * ((LONG + headroom) // size)
            of_row.append(list(range(first, first + count)))
        blocks.append(of_row)
    return blocks


def mixed_queries(n: int) -> tuple[list[int], list[int]]:
    """Query and context lengths of decodes, short extends and prefills in no order."""
    rng = random.Random(20261121)
    query_lens = [1 if rng.random() < 0.6 else rng.choice((2, 30, 500)) for _ in range(n)]
    return query_lens, [rng.choice((0, 100)) for _ in range(n)]


def long_decodes(n: int, headroom: int = STEPS) -> list[Row]:
    return decodes(n, (LONG - 1024, LONG - 1), headroom)


def prefills(n: int, tokens: int) -> list[Row]:
    count = tokens // BLOCK_SIZE
    return [Row(list(range(1 + i * count, 1 + (i + 1) * count)), 0, tokens) for i in range(n)]


def mixed() -> list[Row]:
    num_decodes, chunk = MIXED
    rows = decodes(num_decodes, headroom=0)
    first = rows[-1].blocks[-1] + 1
    return [*rows, Row(list(range(first, first + 8192 // BLOCK_SIZE)), 2048, chunk)]
