"""InputBatch: the blocks and lengths of the requests in flight, kept from step to step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attncore import arguments
from attncore.builder.blocks.spans import NONE, checked_spans
from attncore.builder.grid import batch_grid, batch_html
from attncore.builder.persistent.batch_arguments import check_new_request, groups_of, ids_by_group
from attncore.builder.persistent.batch_core import BatchCore
from attncore.builder.persistent.block_table import BlockTable
from attncore.builder.persistent.columns import KeepsColumns
from attncore.builder.persistent.kv_cache_group import ONLY_GROUP, KVCacheGroup
from attncore.builder.persistent.request_rows import RequestRows
from attncore.builder.persistent.spans import Spans
from attncore.builder.persistent.state_group import StateGroup
from attncore.builder.persistent.state_slots import StateSlots
from attncore.builder.read_only import read_only
from attncore.builder.show import batch_text
from attncore.builder.uncopied import Uncopied
from attncore.kernels import KernelsName
from attncore.quoted import plain_text, quoted
from attncore.show import counted, guarded, guarded_html


class InputBatch(KeepsColumns, Uncopied):
    """Up to ``max_num_reqs`` requests of up to ``max_model_len`` tokens, in blocks of ``block_size`` tokens.

    Capacity and memory (``nbytes``, host) are fixed at construction. ``num_blocks`` is the number of blocks of the
    cache: block ids must be below it (default: any int32). Block 0 is the null block: a table may hold it where a
    window has passed, and no token may be written to it. A request keeps its row until a build moves it
    (``metadata.moves``). Use from one thread at a time; a second caller is a ConcurrentUseError.

    ``groups``, instead of ``block_size`` and ``num_blocks``, gives several KV-cache groups, each with a table of its
    own; block ids are then passed and returned as a mapping of group name to ids. A StateGroup among them has no table:
    its ids are a list of one slot, which a request holds until it leaves or is preempted. ``max_encoder_len``, in
    tokens, is required with a cross group and refused without one. ``kernels`` names the implementation (None: the
    default). With ``spans``, requests may have bidirectional spans (``set_spans``): steps have ``span_ends``, and each
    backend of a builder over the batch has to have the feature ``bidirectional_spans``.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int | None = None,
        num_blocks: int | None = None,
        groups: Iterable[KVCacheGroup | StateGroup] | None = None,
        max_encoder_len: int | None = None,
        spans: bool = False,
        kernels: KernelsName | None = None,
    ) -> None:
        max_num_reqs = arguments.integer("max_num_reqs", max_num_reqs, 1)
        max_model_len = arguments.integer("max_model_len", max_model_len, 1)
        known, states = groups_of(groups, block_size, num_blocks)
        if any(group.cross for group in known):
            if max_encoder_len is None:
                raise ValueError(f"max_encoder_len: missing; cross group {known[-1].name!r} needs it")
            max_encoder_len = arguments.integer("max_encoder_len", max_encoder_len, 1)
        elif max_encoder_len is not None:
            raise ValueError(f"max_encoder_len: {max_encoder_len} given, but no group is cross")
        self._one_group = groups is None
        self._core = BatchCore(known, max_num_reqs, max_model_len, max_encoder_len or 0, kernels)
        self._core.states = {group.name: StateSlots(self._core, group) for group in states}
        if arguments.flag("spans", spans):
            self._core.spans = Spans(self._core)
        self._append_plain = self._core.append_plain(one_group=self._one_group)
        self._roll_back_plain = self._core.roll_back_plain()

    __repr__ = guarded(batch_text)
    __str__ = guarded(batch_grid)
    _repr_html_ = guarded_html(batch_html)

    @property
    def max_num_reqs(self) -> int:
        return self._core.max_num_reqs

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    @property
    def max_encoder_len(self) -> int:
        """0 without a cross group."""
        return self._core.max_encoder_len

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV-cache groups, the cross group last."""
        return self._core.groups

    @property
    def state_groups(self) -> tuple[StateGroup, ...]:
        """The groups of states, in the order given."""
        return tuple(slots.group for slots in self._core.states.values())

    @property
    def block_size(self) -> int:
        """Of the first group."""
        return self._core.groups[0].block_size

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """int32[max_num_reqs, width]: the live table of the first group, a new read-only view of it at each access."""
        return read_only(self._core.tables[self.groups[0].name].array)

    @property
    def nbytes(self) -> int:
        """Host memory of the tables and the rows, bytes."""
        return self._core.nbytes

    @property
    def kernels(self) -> str:
        """``"cython"`` or ``"numba"``."""
        return str(self._core.kernels.IMPLEMENTATION)

    @property
    def _order(self) -> RequestRows:
        """The order of rows, for methods that only read: nothing in it is of a call that was interrupted."""
        if self._core.state.unfinished:
            self._core.settle()
        return self._core.order

    @property
    def num_reqs(self) -> int:
        return self._order.num_reqs

    @property
    def num_rows(self) -> int:
        """Rows in use, including the empty rows of removed requests, which the next build fills."""
        return len(self._order)

    @property
    def req_ids(self) -> tuple[Hashable, ...]:
        """All requests, in the order of rows."""
        return tuple(req_id for req_id in self._order.req_ids if req_id is not None)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._order.row_of

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.req_ids)

    def __len__(self) -> int:
        return self._order.num_reqs

    def num_computed_tokens(self, req_id: Hashable) -> int:
        """Tokens of the request that are in the cache."""
        return self._core.read(req_id, self._core.num_computed)

    def encoder_seq_len(self, req_id: Hashable) -> int:
        """Encoder tokens of the request; 0: it has no encoder input."""
        return self._core.read(req_id, self._core.encoder_len)

    def block_ids(self, req_id: Hashable) -> Any:
        """The blocks that the request holds, in order: list[int], or with groups a dict of such lists by group name.
        These are manager blocks; 0 where a window has passed. Of a group of states, the one slot.
        """
        return self._answer(self._core.read(req_id, self._core.held))

    def add_request(
        self,
        req_id: Hashable,
        block_ids: Any,
        num_computed_tokens: int = 0,
        *,
        encoder_seq_len: int = 0,
        encoder_computed: bool = False,
    ) -> int:
        """Adds a request; ``num_computed_tokens`` of its tokens are in ``block_ids`` already.

        With a cross group, ``encoder_seq_len`` encoder tokens are kept in that group's blocks: the first step in which
        the request runs has their slots, unless they are in the cache already (``encoder_computed``). Returns the row
        that the request has until a build moves it. Raises ValueError or TypeError, and changes nothing, where the
        batch is full, the name is in use, a block id is invalid, a group has no blocks, the blocks do not hold the
        tokens, block 0 stands where no window has passed, or (as far as few comparisons show it) one block twice; and
        where it has not one slot in each group of states, or that of another request. With computed tokens, the slot
        holds the state behind the last of these already: of blocks that requests share, none is theirs otherwise.
        """
        with self._core.enter():
            num_computed_tokens, encoder_seq_len, encoder_computed = check_new_request(
                self._core, req_id, num_computed_tokens, encoder_seq_len, encoder_computed
            )
            given = self._by_group(req_id, block_ids, all_groups=True)
            row = self._core.order.free_row()
            self._core.undo.append((self._core.vacate, row))
            self._core.state.start(row, num_computed_tokens, encoder_seq_len, encoder_computed)
            for name, slots in self._core.states.items():
                slots.hold(row, slots.checked(row, req_id, given.pop(name), needed=True))
            for name, ids in given.items():
                table = self._core.tables[name]
                passed = table.passed_columns(num_computed_tokens, not self._one_group) if num_computed_tokens else 0
                table.append(row, req_id, ids, passed)
                table.check_holds(row, req_id, encoder_seq_len if table.group.cross else num_computed_tokens)
                if table.group.cross and not encoder_seq_len and table.num_columns(row):
                    raise ValueError(
                        f"encoder_seq_len: 0 of request {quoted(req_id)}, which has blocks in cross group {name!r}; "
                        "say how many encoder tokens they are for, or give none"
                    )
            self._core.add(req_id, row)
            return row

    def set_spans(self, req_id: Hashable, spans: Iterable[Sequence[int]]) -> None:
        """Makes ``spans`` those of the request, in place of what it had: pairs (start, stop) of positions in it.

        The tokens of a span, such as those of an image in a prompt, see each other in both directions, also where a
        window has passed the first; what lies between spans is causal. A span runs in one step: a build that cuts one
        is refused. They are copied, and stay with the request until it leaves, while it is preempted too. Tokens that
        count as computed already were computed with the same spans: a cached prefix is found by its images as well.

        Raises ValueError or TypeError, and changes nothing, where the batch was made without ``spans``, the request is
        not in it, a span has no token or lies beyond ``max_model_len``, or spans overlap or are not in order.
        """
        if self._core.spans is None:
            raise ValueError("spans: this batch was made without; give InputBatch spans=True")
        checked = checked_spans(req_id, spans, self.max_model_len)
        with self._core.enter():
            self._core.spans.put(self._core.order.row(req_id), checked)

    def spans(self, req_id: Hashable) -> list[tuple[int, int]]:
        """The request's spans, as ``set_spans`` was given them; empty: it has none."""
        known = self._core.spans
        found = self._core.read(req_id, known.of_row if known is not None else lambda row: NONE)
        return [(start, stop) for start, stop in found.tolist()]

    def append_blocks(self, req_id: Hashable, block_ids: Any) -> None:
        """Gives the request more blocks, in one group or several; a preempted request takes part in steps again.

        In a group of states a preempted request alone is given a slot. It rests until it has one in each.
        """
        self.append_blocks_many({req_id: block_ids})

    def append_blocks_many(self, block_ids: Mapping[Any, Any]) -> None:
        """``append_blocks`` for several requests in one call; where one is wrong, it raises and changes none."""
        if type(block_ids) is dict and self._append_plain is not None and self._append_plain(block_ids):
            return
        if not isinstance(block_ids, Mapping):
            raise TypeError(f"block_ids: {quoted(block_ids)} is not a mapping of request to block ids")
        with self._core.enter():
            undo, order = self._core.undo, self._core.order
            for req_id, ids in block_ids.items():
                row = order.row(req_id)
                for name, ids_of_group in self._by_group(req_id, ids).items():
                    if (slots := self._core.states.get(name)) is not None:
                        if added := slots.checked(row, req_id, ids_of_group, needed=False):
                            undo.append((slots.hold, row, []))
                            slots.hold(row, added)
                        continue
                    table = self._core.tables[name]
                    undo.append((table.state.truncate, row, table.num_columns(row)))
                    table.append(row, req_id, ids_of_group)
                if (
                    row in order.paused
                    and any(table.num_columns(row) for table in self._core.decoders)
                    and all(slots.held(row) for slots in self._core.states.values())
                ):
                    undo.append((order.paused.add, row))
                    order.paused.discard(row)
                    self._core.state.dirty = True

    def replace_block(self, req_id: Hashable, index: int, block_id: int, group: str | None = None) -> int:
        """Replaces the request's block number ``index`` (copy on write); returns the block that it had.

        A ``block_id`` of 0 makes the block null; ``release_passed_blocks`` then takes the blocks before it as passed.
        Tokens of steps ahead that are not replayed yet do not count for what a window has passed.
        One that the request has elsewhere is refused. ``group`` names the KV-cache group, where there are several, or a
        group of states, whose only index is 0: the engine copies the state to the new slot ahead of the next step.
        """
        with self._core.enter():
            if (slots := self._states(group)) is not None:
                return self._replace_slot(slots, req_id, index, block_id)
            row, table = self._core.order.row(req_id), self._table(group)
            computed = max(0, self._core.num_computed(row) - self._core.tokens_ahead)  # steps.stop() gives these back
            passed = table.passed_columns(computed, not self._one_group)
            index, block_id, was = table.replaces(row, req_id, index, block_id, passed)
            self._core.undo.append((table.put, row, index, was))
            table.put(row, index, block_id)
            self._core.count_change()
            return was

    def truncate_blocks(self, req_id: Hashable, num_blocks: int, group: str | None = None) -> list[int]:
        """Keeps the request's first ``num_blocks`` blocks, which must hold its cached tokens; returns the others.

        ``group`` names the KV-cache group, where there are several.
        """
        with self._core.enter():
            row, table = self._core.order.row(req_id), self._table(group)
            tokens = self._core.num_encoded(row) if table.group.cross else self._core.num_computed(row)
            num_blocks = arguments.integer("num_blocks", num_blocks, 0)
            held, needed = table.held(row), -(-tokens // table.group.block_size)
            if not needed <= num_blocks <= len(held):
                what = "cached encoder token" if table.group.cross else "computed token"
                raise ValueError(
                    f"num_blocks: {num_blocks} is outside {needed}..{len(held)} "
                    f"(request {quoted(req_id)} has {counted(tokens, what)} and {counted(len(held), 'block')})"
                )
            self._core.undo.append((table.refill, row, held))
            table.state.truncate(row, num_blocks * table.group.kernel_blocks)
            self._core.count_change(num_blocks < len(held))
            return held[num_blocks:]

    def release_passed_blocks(self, num_rollback: int = 0) -> dict[Hashable, Any]:
        """Makes null every block that a group's sliding window has passed; returns the released blocks by request.

        A block is released where all its tokens lie before what the request's next query sees, even after a roll-back
        of ``num_rollback`` tokens, and of those of steps ahead that are not replayed yet. Ids are as in ``block_ids``
        (with groups: by group name); requests that released none are left out. Call it between steps: afterwards the
        last step's page indices can no longer be read.
        """
        with self._core.enter():
            num_rollback = arguments.integer("num_rollback", num_rollback, 0)
            num_rollback = min(num_rollback + self._core.tokens_ahead, arguments.INT32_MAX)
            released: dict[Hashable, dict[str, list[int]]] = {}
            for table in self._core.decoders:
                passed: list[tuple[int, int, list[int]]] = []
                self._core.undo.append((table.take_back_passed, passed))
                table.pass_windows(len(self._core.order), num_rollback, passed)
                for row, _, ids in passed:
                    released.setdefault(self._core.order.req_ids[row], {})[table.group.name] = ids
            answer = {req_id: self._answer(by_group) for req_id, by_group in released.items()}
            self._core.count_change(bool(released))
            return answer

    def remove_request(self, req_id: Hashable) -> Any:
        """Removes the request, between any two steps; returns the blocks that it held, as ``block_ids`` does.
        Its row stays empty until the next build.
        """
        with self._core.enter():
            return self._answer(self._core.remove(req_id))

    def preempt(self, req_id: Hashable) -> Any:
        """Takes the request's blocks and progress, to be computed again; returns the blocks that it held.

        It keeps its row and takes part in no step until ``append_blocks`` gives it blocks. Its encoder tokens run
        again too.
        """
        with self._core.enter():
            row = self._core.order.row(req_id)
            held = self._core.clear(row, keeps_encoder=True)
            self._core.order.paused.add(row)
            self._core.count_change()
            return self._answer(held)

    def rollback(self, req_id: Hashable, num_tokens: int) -> None:
        """Takes back the request's last ``num_tokens`` computed tokens (rejected drafts); it keeps its blocks."""
        self.rollback_many({req_id: num_tokens})

    def rollback_many(self, num_tokens: Mapping[Any, int]) -> None:
        """``rollback`` for several requests in one call; where one goes too far, it raises and changes none."""
        if type(num_tokens) is dict and self._roll_back_plain is not None and self._roll_back_plain(num_tokens):
            return
        if not isinstance(num_tokens, Mapping):
            raise TypeError(f"num_tokens: {quoted(num_tokens)} is not a mapping of request to tokens")
        with self._core.enter():
            new: list[tuple[int, int]] = []
            for req_id, count in num_tokens.items():
                row = self._core.order.row(req_id)
                count = arguments.integer("num_tokens", count, 0)
                computed = self._core.num_computed(row)
                if count > computed:
                    raise ValueError(
                        f"num_tokens: {count} goes past the start of request {quoted(req_id)}, "
                        f"which has {counted(computed, 'computed token')}"
                    )
                for table in self._core.decoders:
                    if count and table.group.sliding_window is not None:
                        table.check_sees(row, req_id, computed - count)
                if self._core.states and 0 < count < computed:
                    raise ValueError(
                        f"num_tokens: {count} of request {quoted(req_id)}, whose state in group "
                        f"{next(iter(self._core.states))!r} has taken in its {counted(computed, 'computed token')} and "
                        f"knows none before; preempt the request, or take back all {computed}: it then begins again"
                    )
                new.append((row, computed - count))
                self._core.undo.append((self._core.state.set_computed, row, computed))
            for row, computed in new:
                self._core.state.set_computed(row, computed)

    def swap_rows(self, i: int, j: int) -> None:
        """Exchanges the requests in rows ``i`` and ``j``, for an engine that orders its rows itself.

        The next build still puts decodes before prefills.
        """
        with self._core.enter():
            i, j = arguments.integer("i", i, 0), arguments.integer("j", j, 0)
            for name, row in (("i", i), ("j", j)):
                if row >= len(self._core.order):
                    raise ValueError(f"{name}: row {row} is not in use; num_rows is {len(self._core.order)}")
            if i != j:
                self._core.swap(i, j)

    def needs_block(self, group: str | None = None) -> list[Hashable]:
        """Requests whose next token has no block yet in ``group`` (None: in any), in the order of rows.

        Preempted requests are left out. A cross group never needs a block: its blocks come with the request.
        """
        with self._core.enter():
            tables = self._core.decoders if group is None else [self._table(group)]
            rows = {row for table in tables if not table.group.cross for row in self._core.rows_without_block(table)}
            order = self._core.order
            return [order.req_ids[row] for row in sorted(rows - order.paused - order.holes)]

    def _states(self, group: str | None) -> StateSlots | None:
        return None if group is None else self._core.states.get(plain_text(group) or "")

    def _replace_slot(self, slots: StateSlots, req_id: Hashable, index: int, block_id: int) -> int:
        row = self._core.order.row(req_id)
        index, held = arguments.integer("index", index, 0), slots.held(row)
        if index >= len(held):
            raise ValueError(f"index: {index}, but request {quoted(req_id)} holds {counted(len(held), 'slot')}")
        slot = slots.checked_slot("block_id", block_id)
        self._core.undo.append((slots.hold, row, held))
        slots.hold(row, [slot])
        self._core.count_change()  # for steps ahead, which would go on with the slot before
        return held[0]

    def _table(self, group: str | None) -> BlockTable:
        if (slots := self._states(group)) is not None:
            raise ValueError(
                f"group: {slots.group.name!r} holds states, one slot a request, which neither grows nor shrinks; name "
                f"one of {', '.join(self._core.tables)}"
            )
        if group is None:
            if len(self._core.tables) > 1:
                raise ValueError(f"group: name one of {', '.join(self._core.tables)}")
            return self._core.decoders[0]
        return self._core.tables[arguments.one_of("group", group, self._core.tables)]

    def _by_group(self, req_id: Hashable, block_ids: Any, *, all_groups: bool = False) -> dict[str, Any]:
        """Block ids by the name of their group; with ``all_groups``, every group's."""
        if self._one_group:
            return {ONLY_GROUP: block_ids}
        return ids_by_group(self._core.holders(), req_id, block_ids, all_groups=all_groups)

    def _answer(self, by_group: Mapping[str, Any]) -> Any:
        return by_group[ONLY_GROUP] if self._one_group else by_group
