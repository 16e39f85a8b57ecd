"""The slots of one group of states: which one each request holds, and the field of each step that says so by row."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore import arguments
from attncore.builder.fields import Field, Length, engine_field
from attncore.builder.persistent.columns import Column
from attncore.builder.persistent.state_group import NULL_SLOT_ID, StateGroup
from attncore.builder.persistent.state_step import field_name
from attncore.quoted import quoted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore


class StateSlots(Column):
    """A slot for each request, int32: a column of the batch, so that it follows its request and is sent with each step.

    The null slot where a request holds none, which is a preempted one.
    """

    def __init__(self, core: BatchCore, group: StateGroup) -> None:
        super().__init__(core, field_name(group.name), np.dtype(np.int32))
        self.group = group

    @property
    def field(self) -> Field:
        """The field of each step, by row; padded rows have the null slot."""
        return engine_field(self.name, np.int32, Length.REQUEST)

    @property
    def nbytes(self) -> int:
        return int(self._values.nbytes + self._given.nbytes + self._num_given.nbytes)

    def held(self, row: int) -> list[int]:
        """The slot that the row's request holds, in a list as blocks are; empty: it holds none."""
        slot = int(self._values[self._place(row), 0])
        return [] if slot == NULL_SLOT_ID else [slot]

    def hold(self, row: int, held: list[int]) -> None:
        """Makes the row's request hold what ``held`` has said of it."""
        self._values[self._place(row), 0] = held[0] if held else NULL_SLOT_ID

    def checked(self, row: int, req_id: Hashable, given: Any, *, needed: bool) -> list[int]:
        """``given`` as a list of one slot, or of none unless one is ``needed``.

        ValueError or TypeError where it is another list, or the slot cannot be given to the row's request.
        """
        who = f"block_ids: request {quoted(req_id)} in group {self.group.name!r}"
        slots, held = arguments.items(who, given, most=2), self.held(row)
        if len(slots) + len(held) > 1 or (needed and not slots):
            count = ("no slot", "a slot", "more than one slot")[len(slots)]
            has = f" beside slot {held[0]}, which it holds" if held else ""
            raise ValueError(f"{who}: {count} given{has}; a request has one slot for its state")
        return [self.checked_slot(who, slot) for slot in slots]

    def checked_slot(self, who: str, given: Any) -> int:
        """A slot as an int; ValueError or TypeError that begins with ``who`` where it cannot be a request's."""
        slot = arguments.integer_or_none(given)
        if slot is None:
            raise TypeError(f"{who}: {quoted(given)} is not an integer")
        if slot == NULL_SLOT_ID:
            raise ValueError(f"{who}: slot 0, the null slot, to which padded rows write; give one of 1 and above")
        if not 0 < slot < self.group.limit:
            raise ValueError(f"{who}: slot {slot} is outside 1..{self.group.limit - 1}")
        holders = np.flatnonzero(self._values[:, 0] == slot)
        if len(holders):
            order = self._core.order
            other = next((one for row, one in enumerate(order.req_ids) if self._place(row) == holders[0]), None)
            raise ValueError(
                f"{who}: slot {slot} is that of request {quoted(other)}; a state is one request's, so give another slot"
            )
        return slot
