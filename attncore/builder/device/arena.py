"""The arenas that a step's metadata is written to: one block of memory each, used in turn, laid out by the fields.

On a CPU device arenas rotate and nothing is copied, except for the steps of a captured graph, which reads one fixed
place. On a GPU the arenas are pinned, and a transport (``by_copy``, ``by_graph``) brings each to the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore.builder.device.memory import aligned_bytes, aligned_up
from attncore.builder.fields import FIELDS, Field, Length, Owner
from attncore.kernels import codes

Arrays = dict[str, npt.NDArray[Any]]

HEADER_NBYTES = codes.HEADER_WORDS * 8
JOURNAL_ENTRY_NBYTES = codes.JOURNAL_ENTRY_WORDS * 4


class Capacity(NamedTuple):
    """How large a step may be: what an arena is laid out for."""

    num_tokens: int
    num_reqs: int
    num_encoder_tokens: int = 0


class Views(NamedTuple):
    """Arrays of one arena, laid out for one capacity: the step's own, and each group's (the cross group's last)."""

    fields: dict[str, Any]
    groups: list[dict[str, Any]]


STEPS_OWN = -1
"""Stands for a group: the step's own fields."""


class _Placed(NamedTuple):
    group: int
    """Or STEPS_OWN."""
    field: Field
    offset: int
    length: int


class ArenaRing:
    """``depth`` arenas for steps of at most ``capacity``; step k uses arena k % depth.

    ``block_sizes`` are those of the decoder groups' tables, ``has_cross`` adds a cross group, ``extra`` fields are the
    engine's own. Where a field lies depends on the capacity alone, so that a captured graph finds it again; a
    journal of at most ``journal_entries`` follows the fields. ``allocate`` gives so many bytes of host memory, aligned;
    ``nbytes`` is what all of them take.
    """

    def __init__(
        self,
        capacity: Capacity,
        block_sizes: Sequence[int],
        has_cross: bool,
        depth: int,
        *,
        extra: Sequence[Field] = (),
        journal_entries: int = 0,
        allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        self.capacity, self.depth, self.journal_entries = capacity, depth, journal_entries
        self._block_sizes, self._has_cross, self.extra = tuple(block_sizes), has_cross, tuple(extra)
        self._layouts: dict[Capacity, tuple[list[_Placed], int]] = {}
        self.arena_nbytes = aligned_up(self.journal_offset(capacity) + journal_entries * JOURNAL_ENTRY_NBYTES)
        memory = (allocate or aligned_bytes)(self.arena_nbytes * depth)
        self.memory = [memory[k * self.arena_nbytes : (k + 1) * self.arena_nbytes] for k in range(depth)]
        self._fixed: npt.NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        return self.arena_nbytes * (self.depth + (self._fixed is not None))

    def views(self, capacity: Capacity) -> list[Views]:
        """Every arena's arrays for steps of ``capacity``."""
        return [self.views_of(capacity, _viewer(memory)) for memory in self.memory]

    def fixed_views(self, capacity: Capacity) -> Views:
        """The arrays, for steps of ``capacity``, of the one place in host memory where captured graphs read."""
        return self.views_of(capacity, _viewer(self._fixed_memory()))

    def bytes_of(self, capacity: Capacity) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]:
        """Every arena, and the fixed place, as far as steps of ``capacity`` reach."""
        nbytes = self.journal_offset(capacity)
        return [memory[:nbytes] for memory in self.memory], self._fixed_memory()[:nbytes]

    def journal_offset(self, capacity: Capacity) -> int:
        """Where the journal of a step of ``capacity`` begins, bytes: behind the last field."""
        return self._layout(capacity)[1]

    def header(self, arena: int) -> npt.NDArray[np.int64]:
        """int64[HEADER_WORDS] of an arena."""
        return self.memory[arena][:HEADER_NBYTES].view(np.int64)

    def slots_range(self, capacity: Capacity) -> tuple[int, int]:
        """Where the slots of all decoder groups begin and end, bytes."""
        placed = self._layout(capacity)[0]
        slots = [one for one in placed if one.field.name == "slot_mapping" and one.field.length is Length.TOKEN]
        return slots[0].offset, slots[-1].offset + 8 * slots[-1].length

    def places(self, capacity: Capacity) -> dict[tuple[int, str], int]:
        """Where each array of a step of ``capacity`` begins, in int32 words, by group (or STEPS_OWN) and name."""
        return {(one.group, one.field.name): one.offset // 4 for one in self._layout(capacity)[0]}

    @property
    def page_owners(self) -> list[int]:
        """Decoder groups whose page lists are their own; the others share those of an earlier one."""
        sizes = self._block_sizes
        return [group for group, size in enumerate(sizes) if sizes.index(size) == group]

    def addresses(self) -> npt.NDArray[np.int64]:
        """Where each arena is, int64[depth]."""
        return np.array([memory.ctypes.data for memory in self.memory], np.int64)

    def views_of(self, capacity: Capacity, view: Callable[[int, int, type[np.generic]], Any]) -> Views:
        """Fields for steps of ``capacity`` made by ``view(offset, length, dtype)``."""
        views = Views({}, [{} for _ in range(len(self._block_sizes) + self._has_cross)])
        for group, field, offset, length in self._layout(capacity)[0]:
            (views.fields if group == STEPS_OWN else views.groups[group])[field.name] = view(
                offset, length, field.dtype
            )
        for group, block_size in enumerate(self._block_sizes):
            owner = views.groups[self._block_sizes.index(block_size)]
            for field in _of(Owner.BLOCK_SIZE):
                views.groups[group][field.name] = owner[field.name]
        return views

    def _fixed_memory(self) -> npt.NDArray[np.uint8]:
        if self._fixed is None:
            self._fixed = aligned_bytes(self.arena_nbytes)
        return self._fixed

    def _layout(self, capacity: Capacity) -> tuple[list[_Placed], int]:
        """Where every array lies, per-token fields first, and where the last one ends."""
        if capacity not in self._layouts:
            placed, end = [], HEADER_NBYTES
            # Slots stand together behind the other per-token fields, so that one stretch of -1 clears them.
            order = sorted(self._fields(), key=lambda one: (one[1].length is not Length.TOKEN, one[0] != STEPS_OWN))
            for group, field in order:
                length = field.num_elements(*capacity)
                placed.append(_Placed(group, field, end, length))
                end += aligned_up(length * np.dtype(field.dtype).itemsize)
            self._layouts[capacity] = placed, end
        return self._layouts[capacity]

    def _fields(self) -> list[tuple[int, Field]]:
        fields = [(STEPS_OWN, field) for field in (*_of(Owner.STEP), *self.extra)]
        if self._has_cross:
            fields += [(STEPS_OWN, field) for field in _of(Owner.ENCODER)]
        for group, block_size in enumerate(self._block_sizes):
            fields += [(group, field) for field in _of(Owner.GROUP)]
            if self._block_sizes.index(block_size) == group:
                fields += [(group, field) for field in _of(Owner.BLOCK_SIZE)]
        if self._has_cross:  # kernels fill every group's slots under one name
            slots = FIELDS["cross_slot_mapping"]._replace(name="slot_mapping")
            fields += [(len(self._block_sizes), field) for field in (slots, *_of(Owner.BLOCK_SIZE))]
        return fields


def _of(owner: Owner) -> list[Field]:
    """The fields of an owner that lie in an arena: tables do not, and page indices are gathered from them."""
    elsewhere = (Length.TABLE, Length.PAGE)
    return [
        field
        for field in FIELDS.values()
        if field.owner is owner and field.length not in elsewhere and field.derive is None
    ]


def _viewer(memory: npt.NDArray[np.uint8]) -> Callable[[int, int, type[np.generic]], Any]:
    return lambda offset, length, dtype: memory[offset : offset + length * np.dtype(dtype).itemsize].view(dtype)
