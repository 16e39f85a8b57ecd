"""Rows of a step in plain Python, and what every field of metadata is for a list of them: the oracle.

A row is some tokens of a request beside the keys that they may see. Views, slices, chunks and ranks of a step are lists
of rows again, so that one function says what each of them holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

PAD = -1


class Rank(NamedTuple):
    """One of ``world`` ranks that share out each block, ``interleave`` tokens at a time."""

    world: int
    rank: int
    interleave: int

    def keeps(self, index: int) -> bool:
        return index // self.interleave % self.world == self.rank

    def count(self, tokens: int) -> int:
        return sum(map(self.keeps, range(tokens)))

    def slot(self, block: int, size: int, index: int) -> int:
        """The slot of token ``index``, in ``block`` of ``size`` tokens of all ranks."""
        if not self.keeps(index):
            return PAD
        mine = sum(map(self.keeps, range(index - index % size, index)))
        return block * (size // self.world) + mine


@dataclass(frozen=True)
class Row:
    name: str
    blocks: Mapping[str, Sequence[int]]
    """The kernel's blocks of the request from its first token on, by group."""
    first: int
    """The index of the row's first token in its request."""
    positions: tuple[int, ...]
    """Of each token."""
    masks: tuple[int, ...]
    ends: tuple[int, ...]
    decode: bool
    start: int = 0
    """The index of the first key."""
    encoder: int = 0
    fresh: int = 0
    """Encoder tokens that run in this step."""
    states: dict[str, int] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """Of the engine's fields: a number for the row, or a tuple for its tokens."""

    @property
    def count(self) -> int:
        return len(self.positions)

    @property
    def stop(self) -> int:
        """The index behind the row's last token."""
        return self.first + self.count

    def moved(self, tokens: int) -> Row:
        """The row so many tokens later, of one token."""
        return replace(self, first=self.first + tokens, positions=(self.first + tokens,))

    def moved_by(self, tokens: int) -> Row:
        """The row with so many tokens more ahead of it."""
        return replace(self, first=self.first + tokens, positions=tuple(at + tokens for at in self.positions))

    def part(self, before: int, after: int) -> Row:
        """Without so many tokens at its beginning, which are context then, and at its end."""
        kept = slice(before, self.count - after)
        return replace(
            self,
            first=self.first + before,
            positions=self.positions[kept],
            masks=self.masks[kept],
            ends=self.ends[kept],
            fresh=0 if before else self.fresh,
        )


class Group(NamedTuple):
    name: str
    size: int
    """Tokens of a kernel's block."""
    cross: bool = False


def views(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Decodes and prefills."""
    return [row for row in rows if row.decode], [row for row in rows if not row.decode]


def cut(rows: list[Row], start: int, stop: int) -> list[Row]:
    """What lies in tokens start:stop."""
    found, at = [], 0
    for row in rows:
        first, last = max(start, at), min(stop, at + row.count)
        if first < last:
            found.append(row.part(first - at, at + row.count - last))
        at += row.count
    return found


def chunks(rows: list[Row], size: int) -> list[Row]:
    """Local attention: a row for each chunk of ``size`` tokens that a row's tokens are in."""
    found = []
    for row in rows:
        for chunk in range(row.first // size, (row.stop - 1) // size + 1):
            first, stop = max(row.first, chunk * size), min(row.stop, (chunk + 1) * size)
            found.append(replace(row.part(first - row.first, row.stop - stop), start=chunk * size, encoder=0, fresh=0))
    return found


def sums(numbers: Sequence[int]) -> list[int]:
    return [0, *accumulate(numbers)]


def paged(lengths: list[int], tables: list[Sequence[int]], size: int) -> dict[str, Any]:
    """What follows from lengths and blocks."""
    pages = [-(-length // size) for length in lengths]
    return {
        "seq_lens": lengths,
        "seq_start_loc": sums(lengths),
        "paged_kv_indptr": sums(pages),
        "paged_kv_num_pages": pages,
        "paged_kv_last_page_len": [(length - 1) % size + 1 if length else 0 for length in lengths],
        "paged_kv_indices": [block for table, count in zip(tables, pages, strict=False) for block in table[:count]],
    }


WITHOUT_TABLE = {"paged_kv_indptr": 0, "paged_kv_num_pages": 0, "paged_kv_last_page_len": 0, "slot_mapping": PAD}


def without_table(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a step of prompts that neither write nor read a cache."""
    tableless = {name: [with_] * len(found[name]) for name, with_ in WITHOUT_TABLE.items()}
    return found | tableless | {"block_table": [[] for _ in found["query_lens"]], "paged_kv_indices": []}


def fields_of(rows: list[Row], group: Group, rank: Rank | None = None) -> dict[str, Any]:
    """Every field and count of a step of ``rows``, decodes first."""
    size, counts = group.size, [row.count for row in rows]
    starts = sums(counts)
    lengths = [row.stop - row.start for row in rows]
    contexts = [row.first - row.start for row in rows]
    tables = [list(row.blocks[group.name][row.start // size :]) for row in rows]
    slots = [
        (row.blocks[group.name][i // size] * size + i % size if rank is None
         else rank.slot(row.blocks[group.name][i // size], size, i))
        for row in rows for i in range(row.first, row.stop)
    ] if not group.cross else []  # fmt: skip
    if rank is not None:
        lengths, contexts = [[rank.count(n) for n in some] for some in (lengths, contexts)]
        size //= rank.world
    longest = [max((n for n, row in zip(lengths, rows, strict=True) if row.decode is kind), default=0)
               for kind in (True, False)]  # fmt: skip
    encoders = [row.encoder for row in rows]
    decodes, prefills = views(rows)
    return {
        "slot_mapping": slots,
        "positions": [one for row in rows for one in row.positions],
        "token_to_req_indices": [index for index, row in enumerate(rows) for _ in row.positions],
        "tree_mask": [one for row in rows for one in row.masks],
        "span_ends": [one for row in rows for one in row.ends],
        "context_lens": contexts,
        "query_lens": counts,
        "query_start_loc": starts,
        "logits_indices": [stop - 1 for stop in starts[1:]],
        "block_table": tables,
        **paged(lengths, tables, size),
        "num_reqs": len(rows),
        "num_tokens": sum(counts),
        "num_decodes": len(decodes),
        "num_decode_tokens": sum(row.count for row in decodes),
        "num_prefills": len(prefills),
        "num_prefill_tokens": sum(row.count for row in prefills),
        "max_query_len": max(counts, default=0),
        "max_decode_query_len": max((row.count for row in decodes), default=1),
        "max_decode_seq_len": longest[0],
        "max_prefill_seq_len": longest[1],
        "max_seq_len": max(longest),
        "num_encoder_tokens": sum(encoders),
        "max_encoder_seq_len": max(encoders, default=0),
    }


def encoder_fields(rows: list[Row], cross: Group) -> dict[str, Any]:
    """The fields of a step whose batch has the group ``cross``, in each of its groups."""
    encoders, fresh = [row.encoder for row in rows], [row.fresh for row in rows]
    tables = [list(row.blocks[cross.name]) for row in rows]
    return {
        "encoder_seq_lens": encoders,
        "encoder_query_lens": fresh,
        "encoder_seq_start_loc": sums(encoders),
        "encoder_query_start_loc": sums(fresh),
        "cross_slot_mapping": [
            table[i // cross.size] * cross.size + i % cross.size
            for table, count in zip(tables, fresh, strict=True)
            for i in range(count)
        ],
        "cross_block_table": tables,
    }


def of_cross_group(rows: list[Row], cross: Group) -> dict[str, Any]:
    """What differs in the group itself: lengths and pages are the encoder's, and it has no slots of tokens."""
    tables = [list(row.blocks[cross.name]) for row in rows]
    return paged([row.encoder for row in rows], tables, cross.size)


WITH = {"positions": 0, "context_lens": 0, "query_lens": 0, "logits_indices": 0, "paged_kv_last_page_len": 0,
        "paged_kv_num_pages": 0, "slot_mapping": PAD, "encoder_query_lens": 0, "tree_mask": 0,
        "span_ends": 0}  # fmt: skip
OF_TOKENS = frozenset({"slot_mapping", "positions", "token_to_req_indices", "tree_mask", "span_ends"})
REPEATED = frozenset({"query_start_loc", "paged_kv_indptr", "encoder_query_start_loc"})


def pad(found: dict[str, Any], rows: int, tokens: int, query_len: int, pad_seq_len: int) -> dict[str, Any]:
    """The fields of a step padded to a captured size, in which all rows are decodes."""
    more, more_tokens = rows - found["num_reqs"], tokens - found["num_tokens"]
    out = dict(found)
    for name, value in found.items():
        if name in WITH:
            out[name] = value + [WITH[name]] * (more_tokens if name in OF_TOKENS else more)
        elif name in REPEATED:
            out[name] = value + value[-1:] * more
        elif name.endswith("seq_lens"):
            out[name] = value + [pad_seq_len] * more
        elif name.endswith("seq_start_loc"):
            out[name] = value + [value[-1] + pad_seq_len * index for index in range(1, more + 1)]
    longest = max(found["max_seq_len"], pad_seq_len if more else 0)
    return out | {
        "token_to_req_indices": found["token_to_req_indices"] + [rows - 1] * more_tokens,
        "num_reqs": rows, "num_tokens": tokens, "num_decode_tokens": tokens,
        "num_prefills": 0, "num_prefill_tokens": 0, "max_prefill_seq_len": 0, "max_decode_seq_len": longest,
        "max_seq_len": longest, "max_query_len": query_len, "max_decode_query_len": query_len,
    }  # fmt: skip
