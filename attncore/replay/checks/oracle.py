"""The metadata of a step once more, token by token in plain Python, from what the scheduler knows.

The order of rows is the builder's to choose (decodes first); everything else follows from it.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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


class Row(NamedTuple):
    """What one request does in a step: ``query_len`` tokens after ``context_len`` others, in ``blocks``."""

    context_len: int
    query_len: int
    blocks: Sequence[int]


INT64_FIELDS = ("slot_mapping", "positions")
INT32_FIELDS = (
    "token_to_req_indices",
    "query_start_loc",
    "seq_start_loc",
    "seq_lens",
    "context_lens",
    "query_lens",
    "logits_indices",
    "paged_kv_indptr",
    "paged_kv_indices",
    "paged_kv_last_page_len",
)
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


def expected(rows: Sequence[Row], block_size: int, threshold: int = 1, shard: Shard = WHOLE) -> dict[str, Any]:
    """Every field of a step with these rows, decodes first: ints and lists of ints, without ``block_table``.

    A decode runs up to ``threshold`` tokens. With a ``shard`` the fields are that rank's, whose blocks hold
    ``block_size`` tokens each.
    """
    whole, tokens_per_id = shard.world_size == 1, block_size * shard.world_size
    slots, positions, owners = [], [], []
    pages: list[int] = []
    page_counts, seq_lens, context_lens = [], [], []
    for index, row in enumerate(rows):
        length = row.context_len + row.query_len
        for position in range(row.context_len, length):
            kept, offset = (True, position % block_size) if whole else shard.place(position, block_size)
            block = row.blocks[position // tokens_per_id]
            slots.append(block * block_size + offset if kept else -1)
            positions.append(position)
            owners.append(index)
        context_lens.append(row.context_len if whole else shard.kept(row.context_len, block_size))
        seq_lens.append(context_lens[-1] + sum(slot >= 0 for slot in slots[len(slots) - row.query_len :]))
        page_counts.append(-(-seq_lens[-1] // block_size))
        pages += row.blocks[: page_counts[-1]]
    query_lens = [row.query_len for row in rows]
    query_start_loc = [0, *accumulate(query_lens)]
    decodes = [index for index, count in enumerate(query_lens) if count <= threshold]
    prefills = [index for index, count in enumerate(query_lens) if count > threshold]
    return {
        "slot_mapping": slots,
        "positions": positions,
        "token_to_req_indices": owners,
        "query_start_loc": query_start_loc,
        "seq_start_loc": [0, *accumulate(seq_lens)],
        "seq_lens": seq_lens,
        "context_lens": context_lens,
        "query_lens": query_lens,
        "logits_indices": [start - 1 for start in query_start_loc[1:]],
        "paged_kv_indptr": [0, *accumulate(page_counts)],
        "paged_kv_indices": pages,
        "paged_kv_last_page_len": [(length - 1) % block_size + 1 if length else 0 for length in seq_lens],
        "num_reqs": len(rows),
        "num_tokens": len(slots),
        "num_decodes": len(decodes),
        "num_decode_tokens": sum(query_lens[index] for index in decodes),
        "num_prefills": len(prefills),
        "num_prefill_tokens": sum(query_lens[index] for index in prefills),
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "max_prefill_seq_len": max((seq_lens[index] for index in prefills), default=0),
        "max_decode_seq_len": max((seq_lens[index] for index in decodes), default=0),
        "max_decode_query_len": max((query_lens[index] for index in decodes), default=1),
    }


def _blocks(row: Row, block_size: int, shard: Shard) -> int:
    """Blocks of the row's tokens, which stand for ``block_size`` tokens on every rank."""
    return -(-(row.context_len + row.query_len) // (block_size * shard.world_size))


def differences(
    metadata: Any, planned: Mapping[Any, Row], block_size: int, threshold: int = 1, shard: Shard = WHOLE
) -> list[str]:
    """One sentence for each field of ``metadata`` (host arrays) that is not what the oracle makes of ``planned``.

    ``planned`` has the rows of this step by request id, in any order.
    """
    req_ids = list(metadata.req_ids)
    if len(req_ids) != len(planned) or set(req_ids) != set(planned):
        return [f"req_ids: {len(req_ids)} rows found, the step has {len(planned)}, or others"]
    rows = [planned[req_id] for req_id in req_ids]
    query_lens = [row.query_len for row in rows]
    if any(a > threshold >= b for a, b in pairwise(query_lens)):
        return ["req_ids: a decode stands after a prefill"]
    wanted = expected(rows, block_size, threshold, shard)
    found = [
        f"{name}: {getattr(metadata, name)} found, {wanted[name]} expected"
        for name in COUNTS
        if getattr(metadata, name) != wanted[name]
    ]
    for names, dtype in ((INT64_FIELDS, np.int64), (INT32_FIELDS, np.int32)):
        for name in names:
            found += _difference(name, getattr(metadata.host, name), np.array(wanted[name], dtype=dtype))
    return found + _table_differences(metadata.host.block_table, rows, block_size, shard)


def _difference(name: str, found: Any, wanted: np.ndarray[Any, Any]) -> list[str]:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return [f"{name}: {found.dtype}{list(found.shape)} found, {wanted.dtype}{list(wanted.shape)} expected"]
    wrong = np.flatnonzero(found != wanted)
    if not wrong.size:
        return []
    first = wrong[0]
    return [f"{name}: [{first}] is {found[first]}, {wanted[first]} expected ({wrong.size} of {wanted.size} differ)"]


def _table_differences(table: Any, rows: Sequence[Row], block_size: int, shard: Shard) -> list[str]:
    """A row holds the blocks of its tokens, then at most blocks the request holds for later, then zeros."""
    if table.dtype != np.int32 or table.ndim != 2 or len(table) != len(rows):
        return [f"block_table: {table.dtype}{list(table.shape)} found, int32 with {len(rows)} rows expected"]
    for index, row in enumerate(rows):
        nonzero = np.flatnonzero(table[index])
        found = table[index][: nonzero[-1] + 1 if nonzero.size else 0].tolist()
        if len(found) < _blocks(row, block_size, shard) or found != list(row.blocks[: len(found)]):
            return [f"block_table: row {index} is {_short(found)}, {_short(row.blocks)} expected"]
    return []


def _short(blocks: Sequence[int]) -> str:
    """A row in a message: its first blocks, and how many there are."""
    return f"{list(blocks[:6])} of {len(blocks)}"
