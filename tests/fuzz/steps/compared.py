"""Metadata of a part of a step beside what the oracle says of its rows: every field, on the host and on the device."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fuzz.steps.rows import Group, Rank, Row, encoder_fields, fields_of, of_cross_group, pad, paged, without_table
from fuzz.steps.settings import Settings
from torch import Tensor

from attncore.builder.fields import ACTUAL_COUNTS, ARRAYS, COUNTS, ENCODER_ARRAYS
from attncore.errors import AttncoreError

MAXIMA = frozenset({"max_seq_len", "max_decode_seq_len", "max_prefill_seq_len"})
OF_ENCODERS = frozenset({"num_encoder_tokens", "max_encoder_seq_len", "max_seq_len"})
LIVE = frozenset({"block_table", "cross_block_table", "paged_kv_indices"})


@dataclass
class Part:
    """Metadata of each group for some rows of a step."""

    metadata: dict[str, Any]
    rows: list[Row]
    """As the device has them."""
    host_rows: list[Row]
    """As the host has them: with upper bounds of lengths, in an overlapped step."""
    how: tuple[str, ...] = ()
    rank: Rank | None = None
    padded: tuple[int, int, int] | None = None
    """The rows, tokens and tokens a row of the captured size."""
    of_tokens: bool = False
    """Whether that size is one of rows of any lengths."""
    missing: frozenset[str] = frozenset()
    """Fields that were skipped on the way from another process, and what is made of them."""
    bounded: bool = False
    """Whether the lengths on the host are upper bounds."""
    names: bool = True
    """Whether it has the names of its requests, states and fields of the engine."""
    whole: bool = True
    """Whether it is a step of a builder itself."""
    encoder: bool = True
    engine: bool = False
    """Whether it has the engine's own fields."""
    requests: dict[str, Any] = field(default_factory=dict)
    """What the program keeps of each."""
    tree_mask: bool = True
    """Whether it is of the builder that takes trees."""
    exact_on_host: frozenset[str] = frozenset()
    """Fields of which the host has the device's numbers, whatever it has of lengths: what an engine gave."""
    ahead: bool = False
    """Whether the device is ahead of the step that was built, so that what was not sent may be refused."""
    lent: bool = False
    """Whether padded rows have the pages of their lengths, as in adopted steps: block 0."""
    tableless: bool = False
    """Whether it is of prompts without a table, whose slots are -1."""
    lists: bool = False
    """Whether the list builder's rules hold."""
    stale: bool = False
    """Whether its tables are no longer looked at."""
    loose: bool = False
    """Whether its counts are upper bounds, as of a step that came from another process so."""

    @property
    def names_of_rows(self) -> tuple[Any, ...]:
        return tuple(row.name for row in self.rows)

    @property
    def any(self) -> Any:
        return next(iter(self.metadata.values()))


def as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


class Comparer:
    def __init__(self, draw: random.Random, settings: Settings) -> None:
        self.draw, self.settings = draw, settings
        self.groups = settings.kernel_groups
        self.late: list[Callable[[], None]] = []
        """Comparisons with what the device may still be computing."""

    def expected(self, part: Part, group: Group, rows: list[Row]) -> dict[str, Any]:
        found = fields_of(rows, group, part.rank)
        if part.tableless:
            found = without_table(found)
        cross = self.settings.cross
        if cross is not None and part.encoder:
            found |= encoder_fields(rows, cross)
        if part.padded is not None:
            found = pad(found, *part.padded, self.settings.pad_seq_len)
            if part.lent:
                found |= paged(found["seq_lens"], [*found["block_table"], *[[0]] * part.padded[0]], group.size)
            if cross is not None and len(rows) < part.padded[0] and part.encoder:
                longest = max((row.encoder for row in rows), default=0)
                found["max_encoder_seq_len"] = max(longest, self.settings.pad_seq_len)
        if group.cross:
            own = of_cross_group(rows, group)
            if part.padded is not None:
                padded = pad(fields_of(rows, group) | own, *part.padded, self.settings.pad_seq_len)
                own = {name: padded[name] for name in own}
            found |= own | {"block_table": [list(row.blocks[group.name]) for row in rows]}
            found["max_seq_len"] = found["max_encoder_seq_len"]
            for name in ("slot_mapping", "max_decode_seq_len", "max_prefill_seq_len"):
                del found[name]
        if not (cross is not None and part.encoder):
            found |= {"num_encoder_tokens": 0, "max_encoder_seq_len": 0}
        if not self.settings.trees or not part.tree_mask:
            del found["tree_mask"]
        if not self.settings.spans:
            del found["span_ends"]
        elif not any(found["span_ends"]) and not part.of_tokens:
            found["span_ends"] = None
        return found

    def compare(
        self, part: Part, *, some: float = 1.0, names: Collection[str] | None = None,
        sides: tuple[str, ...] = ("host", "device"), live: bool = True,
    ) -> None:  # fmt: skip
        """Compares each field, or those of ``names``, with a probability of ``some``.

        In a random order, for the first read of a field may send it.
        """
        for name, metadata in part.metadata.items():
            group = self.groups[name]
            on_host, on_device = (self.expected(part, group, rows) for rows in (part.host_rows, part.rows))
            on_host |= {one: on_device[one] for one in part.exact_on_host & on_device.keys()}
            order = [*on_device, *sorted(ENCODER_ARRAYS - on_device.keys())]
            self.draw.shuffle(order)
            for field_name in order:
                if self.draw.random() > some or (names is not None and field_name not in names):
                    continue
                if field_name in LIVE and (part.stale or not live):
                    continue
                where = (*part.how, name, field_name)
                if field_name in COUNTS or field_name in ACTUAL_COUNTS:
                    found = getattr(metadata, field_name)
                    unsaid = {"encoder_seq_lens", "encoder_seq_start_loc"} <= part.missing
                    if field_name == "max_seq_len" and group.cross and "seq_lens" in part.missing:
                        continue  # a view's is the decoder's then
                    if (part.loose and field_name in MAXIMA) or (unsaid and field_name in OF_ENCODERS):
                        assert found >= on_host[field_name], where
                        continue
                    assert found == on_host[field_name], (*where, found, on_host[field_name])
                elif field_name in ARRAYS:
                    both = [(metadata.host, on_host, "host"), (metadata, on_device, "device")]
                    self.draw.shuffle(both)
                    for of, wanted, kind in both:
                        if kind in sides:
                            self._array(part, of, field_name, wanted, (*where, kind))
            if names is None:
                self._attributes(part, metadata, sides)

    def _array(self, part: Part, of: Any, name: str, wanted: dict[str, Any], where: tuple[Any, ...]) -> None:
        if name in part.missing or part.ahead:
            try:
                getattr(of, name)
            except AttributeError:
                return
            except AttncoreError:
                if part.ahead:
                    return
                assert (name, part.bounded) == ("paged_kv_indices", True), where
                return
        elif name not in wanted:
            assert not hasattr(of, name), where
            return
        if name == "paged_kv_indices" and part.bounded and not part.whole:
            try:
                found = of.paged_kv_indices
            except AttncoreError:  # the device alone knows where they begin
                return
        else:
            assert hasattr(of, name), where
            found = getattr(of, name)
        expected = wanted[name]
        if expected is None or found is None:
            assert found is expected, (*where, as_list(found), expected)
            return
        if name.endswith("block_table"):
            self._later(found, partial(self._table, part, name, wanted, where))
        elif name == "paged_kv_indices":
            self.equal(found, expected, where, first=len(expected))
        else:
            self.equal(found, expected, where)

    def equal(self, found: Any, expected: list[Any], where: tuple[Any, ...], first: int | None = None) -> None:
        """That ``found`` is ``expected``, perhaps the ``first`` of it; at ``check`` where it lies on a device."""

        def compare(found: list[Any]) -> None:
            assert found[:first] == expected, (*where, found, expected)

        self._later(found, compare)

    def check(self) -> None:
        """Waits for the device, and compares what lies there."""
        late, self.late = self.late, []
        for compare in late:
            compare()

    def lag(self) -> None:
        """Keeps the device behind the host, now and then, and looks at what it found now and then."""
        if self.draw.random() < 0.3:
            self.check()
        if self.draw.random() < 0.5:
            torch.cuda._sleep(self.draw.choice([300_000, 3_000_000]))  # type: ignore[no-untyped-call]

    def _later(self, found: Any, compare: Callable[[list[Any]], None]) -> None:
        if self.settings.lags and isinstance(found, Tensor) and found.is_cuda:
            kept = found.clone()
            self.late.append(lambda: compare(kept.tolist()))
        else:
            compare(as_list(found))

    def _table(
        self, part: Part, name: str, wanted: dict[str, Any], where: tuple[Any, ...], found: list[list[int]]
    ) -> None:  # fmt: skip
        """Of each row, the blocks of its length."""
        expected, lengths = wanted[name], wanted["encoder_seq_lens" if name == "cross_block_table" else "seq_lens"]
        size = self.groups[part_group(where)].size // (part.rank.world if part.rank else 1)
        if name == "cross_block_table":
            size = self.settings.cross.size  # type: ignore[union-attr]
        assert len(found) >= len(expected), (*where, found, expected)
        if part.tableless:
            assert expected == found, (*where, found)
            return
        for row, (blocks, length) in enumerate(zip(expected, lengths, strict=False)):
            held = -(-length // size)
            assert found[row][:held] == blocks[:held], (*where, row, found[row], blocks)

    def _attributes(self, part: Part, metadata: Any, sides: tuple[str, ...]) -> None:
        if self.draw.random() < 0.1:
            texts = [repr(metadata), str(metadata), metadata._repr_html_(), *dir(metadata), repr(metadata.host)]
            assert all(texts), part.how
            assert not any("Error" in text for text in texts), (*part.how, texts[:3])
        assert metadata.of_rank is (part.rank is not None and part.rank.world > 1), part.how
        assert metadata.use_cuda_graph is (part.padded is not None), part.how
        assert metadata.decodes_first is not part.lists, part.how
        assert metadata.from_groups is part.lists, part.how
        assert metadata.host_lengths == ("bounded" if part.bounded else "exact"), part.how
        if part.names:
            assert metadata.req_ids == part.names_of_rows, (part.how, metadata.req_ids)
            for slots in self.settings.states:
                states = metadata.states[slots.name]
                self._states(part, [states, states.host] if "device" in sides else [states.host], slots.name)
        if part.whole:
            assert (metadata.num_actual_reqs, metadata.num_actual_tokens) == (
                len(part.rows), sum(row.count for row in part.rows))  # fmt: skip

    def _states(self, part: Part, both: list[Any], group: str) -> None:
        rows, more = part.rows, 0 if part.padded is None else part.padded[0] - len(part.rows)
        wanted = [row.states[group] for row in rows] + [0] * more
        begun = [row.first > 0 for row in rows] + [False] * more
        starts = fields_of(rows, next(iter(self.groups.values())))["query_start_loc"]
        for of in both:
            self.equal(of.state_slot, wanted, (part.how, group, "state_slot"))
            self.equal(of.has_initial_state, begun, (part.how, group, "has_initial_state"))
            self.equal(of.query_start_loc, starts + starts[-1:] * more, (part.how, group, "query_start_loc"))


def part_group(where: tuple[Any, ...]) -> str:
    return str(where[-3])
