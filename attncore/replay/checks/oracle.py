"""The fields of a step's metadata once more, token by token in plain Python, from what the scheduler knows.

The order of rows is the builder's to choose (decodes first); everything else follows from it.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attncore.builder import fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Shard(NamedTuple):
    """One of ``world_size`` ranks that share out every request's tokens, ``interleave`` in turn."""

    world_size: int
    rank: int
    interleave: int

    def place(self, position: int, block_size: int) -> tuple[bool, int]:
        """Whether the rank keeps the token, and where in its block (``block_size`` tokens of a rank)."""
        virtual = position % (block_size * self.world_size)
        run = virtual // self.interleave
        offset = run // self.world_size * self.interleave + position % self.interleave
        return run % self.world_size == self.rank, offset

    def kept(self, count: int, block_size: int) -> int:
        """How many of a request's first ``count`` tokens the rank keeps."""
        return sum(self.place(position, block_size)[0] for position in range(count))


WHOLE = Shard(1, 0, 1)


class PlannedRow(NamedTuple):
    """What one request does in a step: ``query_len`` tokens after ``context_len`` others, in ``blocks``."""

    context_len: int
    query_len: int
    blocks: Sequence[int]

    def num_blocks(self, block_size: int, shard: Shard) -> int:
        """The blocks of its tokens; a block id stands for ``block_size`` tokens on every rank."""
        return -(-(self.context_len + self.query_len) // (block_size * shard.world_size))


COUNTS = (
    "num_reqs",
    "num_tokens",
    "num_decodes",
    "num_decode_tokens",
    "num_prefills",
    "num_prefill_tokens",
    "max_query_len",
    "max_seq_len",
    "max_prefill_seq_len",
    "max_decode_seq_len",
    "max_decode_query_len",
)


class Oracle:
    """The fields of a step with ``rows``, decodes first: each a list of ints or an int, under its own name.

    A decode runs up to ``threshold`` tokens. With a ``shard`` the fields are that rank's, whose blocks hold
    ``block_size`` tokens each.
    """

    def __init__(self, rows: Sequence[PlannedRow], block_size: int, threshold: int = 1, shard: Shard = WHOLE) -> None:
        self.rows, self.block_size, self.shard = rows, block_size, shard
        self.decodes = [index for index, row in enumerate(rows) if row.query_len <= threshold]
        self.prefills = [index for index, row in enumerate(rows) if row.query_len > threshold]

    # one a token

    @cached_property
    def slots_of_rows(self) -> list[list[int]]:
        """The slots of each row's tokens; -1 where another rank keeps the token."""
        size, shard = self.block_size, self.shard
        slots = []
        for row in self.rows:
            of_row = []
            for position in range(row.context_len, row.context_len + row.query_len):
                kept, offset = (True, position % size) if shard is WHOLE else shard.place(position, size)
                block = row.blocks[position // (size * shard.world_size)]
                of_row.append(block * size + offset if kept else -1)
            slots.append(of_row)
        return slots

    @property
    def slot_mapping(self) -> list[int]:
        return [slot for of_row in self.slots_of_rows for slot in of_row]

    @property
    def positions(self) -> list[int]:
        return [row.context_len + token for row in self.rows for token in range(row.query_len)]

    @property
    def token_to_req_indices(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) for _ in range(row.query_len)]

    # one a request

    @property
    def query_lens(self) -> list[int]:
        return [row.query_len for row in self.rows]

    @cached_property
    def context_lens(self) -> list[int]:
        if self.shard is WHOLE:
            return [row.context_len for row in self.rows]
        return [self.shard.kept(row.context_len, self.block_size) for row in self.rows]

    @cached_property
    def seq_lens(self) -> list[int]:
        new = (sum(slot >= 0 for slot in of_row) for of_row in self.slots_of_rows)
        return [context + count for context, count in zip(self.context_lens, new, strict=True)]

    @property
    def logits_indices(self) -> list[int]:
        return [start - 1 for start in self.query_start_loc[1:]]

    # prefix sums

    @property
    def query_start_loc(self) -> list[int]:
        return [0, *accumulate(self.query_lens)]

    @property
    def seq_start_loc(self) -> list[int]:
        return [0, *accumulate(self.seq_lens)]

    # page lists

    @property
    def page_counts(self) -> list[int]:
        """Blocks of each row's tokens on this rank."""
        return [-(-length // self.block_size) for length in self.seq_lens]

    @property
    def paged_kv_indptr(self) -> list[int]:
        return [0, *accumulate(self.page_counts)]

    @property
    def paged_kv_indices(self) -> list[int]:
        return [block for row, count in zip(self.rows, self.page_counts, strict=True) for block in row.blocks[:count]]

    @property
    def paged_kv_last_page_len(self) -> list[int]:
        return [(length - 1) % self.block_size + 1 if length else 0 for length in self.seq_lens]

    # counts

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def num_decode_tokens(self) -> int:
        return sum(self.query_lens[index] for index in self.decodes)

    @property
    def num_prefills(self) -> int:
        return len(self.prefills)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.query_lens[index] for index in self.prefills)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens)

    @property
    def max_prefill_seq_len(self) -> int:
        return max((self.seq_lens[index] for index in self.prefills), default=0)

    @property
    def max_decode_seq_len(self) -> int:
        return max((self.seq_lens[index] for index in self.decodes), default=0)

    @property
    def max_decode_query_len(self) -> int:
        return max((self.query_lens[index] for index in self.decodes), default=1)


FIELDS: Mapping[str, str] = {
    name: np.dtype(field.dtype).name for name, field in fields.FIELDS.items() if hasattr(Oracle, name)
}
"""The fields that the oracle computes, with the dtype of the host array. (``block_table`` is compared by rows, in
metadata_check.py.)
"""


def expected(rows: Sequence[PlannedRow], block_size: int, threshold: int = 1, shard: Shard = WHOLE) -> dict[str, Any]:
    """Every field of FIELDS and COUNTS, by name."""
    oracle = Oracle(rows, block_size, threshold, shard)
    return {name: getattr(oracle, name) for name in (*FIELDS, *COUNTS)}
