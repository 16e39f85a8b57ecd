"""The arenas that steps are written to: one block of memory each, used in turn, laid out by ``fields.FIELDS``.

On a CPU device arenas rotate and nothing is copied, except for padded steps, which go to the fixed place where
captured graphs read. On a GPU the arenas are pinned, and a transport (``by_copy``, ``by_graph``) sends them to the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    """The largest step that an arena is laid out for."""

    num_tokens: int
    num_reqs: int
    num_encoder_tokens: int = 0


class Views(NamedTuple):
    """The arrays of one arena for one capacity: those of the step, and those of each group (the cross group last)."""

    fields: dict[str, Any]
    groups: list[dict[str, Any]]


STEPS_OWN = -1
"""In place of a group's index: the fields of the step."""


class _Placed(NamedTuple):
    group: int
    """The index of the group, or STEPS_OWN."""
    field: Field
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + aligned_up(self.length * np.dtype(self.field.dtype).itemsize)


class _Layout(NamedTuple):
    placed: list[_Placed]
    journal: int
    """Where the journal begins, bytes: behind the fields that are sent."""
    end: int


class ArenaRing:
    """``depth`` arenas for steps of at most ``capacity``; step k uses arena k % depth.

    ``block_sizes`` are those of the decoder groups' tables, ``has_cross`` adds a cross group, and ``extra`` are the
    engine's own fields. The place of a field depends on the capacity alone, so that it stays where a captured graph
    reads it. ``sent`` are the names of the fields that every step is sent with (None: all). A journal of at most
    ``journal_entries`` entries follows them, so that one copy takes both, and the other fields follow the journal.
    ``allocate(nbytes)`` returns aligned host memory; ``nbytes`` is the memory of all arenas.
    """

    def __init__(
        self,
        capacity: Capacity,
        block_sizes: Sequence[int],
        has_cross: bool,
        depth: int,
        *,
        extra: Sequence[Field] = (),
        sent: Collection[str] | None = None,
        journal_entries: int = 0,
        allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        self.capacity, self.depth, self.journal_entries = capacity, depth, journal_entries
        self._block_sizes, self._has_cross, self.extra = tuple(block_sizes), has_cross, tuple(extra)
        names = frozenset(field.name for _, field in self._fields())
        self.unsent = frozenset() if sent is None else names.difference(sent, (field.name for field in extra))
        """The fields that steps are sent without."""
        self._layouts: dict[Capacity, _Layout] = {}
        self.arena_nbytes = self._layout(capacity).end
        memory = (allocate or aligned_bytes)(self.arena_nbytes * depth)
        self.memory = [memory[k * self.arena_nbytes : (k + 1) * self.arena_nbytes] for k in range(depth)]
        self._fixed: npt.NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        return self.arena_nbytes * (self.depth + (self._fixed is not None))

    def views(self, capacity: Capacity) -> list[Views]:
        """The arrays of every arena for steps of ``capacity``."""
        return [self.views_of(capacity, _viewer(memory)) for memory in self.memory]

    def fixed_views(self, capacity: Capacity) -> Views:
        """The arrays for steps of ``capacity`` at the fixed place in host memory where captured graphs read."""
        return self.views_of(capacity, _viewer(self._fixed_memory()))

    def bytes_of(self, capacity: Capacity) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]:
        """The bytes that steps of ``capacity`` use, of every arena and of the fixed place."""
        nbytes = self.journal_offset(capacity)
        return [memory[:nbytes] for memory in self.memory], self._fixed_memory()[:nbytes]

    def journal_offset(self, capacity: Capacity) -> int:
        """The offset of the journal of a step of ``capacity``, bytes: behind the last field that is sent."""
        return self._layout(capacity).journal

    def spans(self, capacity: Capacity, names: Collection[str]) -> list[tuple[int, int]]:
        """Where the fields of these names begin and end in a step of ``capacity``, bytes; adjacent ones are one."""
        spans: list[tuple[int, int]] = []
        for place in self._layout(capacity).placed:
            if place.field.name in names:
                start = spans.pop()[0] if spans and spans[-1][1] == place.offset else place.offset
                spans.append((start, place.end))
        return spans

    def header(self, arena: int) -> npt.NDArray[np.int64]:
        """The header of an arena, int64[HEADER_WORDS]."""
        return self.memory[arena][:HEADER_NBYTES].view(np.int64)

    def slots_range(self, capacity: Capacity) -> tuple[int, int]:
        """Where the slot mappings of all decoder groups begin and end, bytes."""
        placed = self._layout(capacity).placed
        slots = [place for place in placed if place.field.name == "slot_mapping" and place.field.length is Length.TOKEN]
        return slots[0].offset, slots[-1].offset + 8 * slots[-1].length

    def places(self, capacity: Capacity) -> dict[tuple[int, str], int]:
        """The offset of each array of a step of ``capacity``, in int32 words, by group (or STEPS_OWN) and name."""
        return {(place.group, place.field.name): place.offset // 4 for place in self._layout(capacity).placed}

    @property
    def page_owners(self) -> list[int]:
        """Decoder groups with page lists of their own; the others share those of an earlier group."""
        sizes = self._block_sizes
        return [group for group, size in enumerate(sizes) if sizes.index(size) == group]

    def addresses(self) -> npt.NDArray[np.int64]:
        """The address of each arena, int64[depth]."""
        return np.array([memory.ctypes.data for memory in self.memory], np.int64)

    def views_of(self, capacity: Capacity, view: Callable[[int, int, type[np.generic]], Any]) -> Views:
        """The fields of steps of ``capacity``, each made by ``view(offset, length, dtype)``, offsets in bytes."""
        views = Views({}, [{} for _ in range(len(self._block_sizes) + self._has_cross)])
        for group, field, offset, length in self._layout(capacity).placed:
            (views.fields if group == STEPS_OWN else views.groups[group])[field.name] = view(
                offset, length, field.dtype
            )
        for group, block_size in enumerate(self._block_sizes):
            owner = views.groups[self._block_sizes.index(block_size)]
            for field in _fields_of(Owner.BLOCK_SIZE):
                views.groups[group][field.name] = owner[field.name]
        return views

    def _fixed_memory(self) -> npt.NDArray[np.uint8]:
        if self._fixed is None:
            self._fixed = aligned_bytes(self.arena_nbytes)
        return self._fixed

    def _layout(self, capacity: Capacity) -> _Layout:
        """The place of every array: the fields that are sent first, and of these the per-token ones."""
        if capacity not in self._layouts:
            # Slot mappings are adjacent, behind the other per-token fields, so that one range of -1 clears them.
            order = sorted(
                self._fields(), key=lambda entry: (entry[1].length is not Length.TOKEN, entry[0] != STEPS_OWN)
            )
            placed: list[_Placed] = []
            journal = self._place([entry for entry in order if entry[1].name not in self.unsent], capacity, placed)
            end = aligned_up(journal + self.journal_entries * JOURNAL_ENTRY_NBYTES)
            end = self._place([entry for entry in order if entry[1].name in self.unsent], capacity, placed, end)
            self._layouts[capacity] = _Layout(placed, journal, end)
        return self._layouts[capacity]

    @staticmethod
    def _place(
        fields: Sequence[tuple[int, Field]], capacity: Capacity, placed: list[_Placed], end: int = HEADER_NBYTES
    ) -> int:
        """Adds the places of ``fields`` behind ``end``; returns where the last one ends, bytes."""
        for group, field in fields:
            placed.append(_Placed(group, field, end, field.num_elements(*capacity)))
            end = placed[-1].end
        return end

    def _fields(self) -> list[tuple[int, Field]]:
        fields = [(STEPS_OWN, field) for field in (*_fields_of(Owner.STEP), *self.extra)]
        if self._has_cross:
            fields += [(STEPS_OWN, field) for field in _fields_of(Owner.ENCODER)]
        for group, block_size in enumerate(self._block_sizes):
            fields += [(group, field) for field in _fields_of(Owner.GROUP)]
            if self._block_sizes.index(block_size) == group:
                fields += [(group, field) for field in _fields_of(Owner.BLOCK_SIZE)]
        if self._has_cross:  # kernels know every group's slots by the same name
            slots = FIELDS["cross_slot_mapping"]._replace(name="slot_mapping")
            fields += [(len(self._block_sizes), field) for field in (slots, *_fields_of(Owner.BLOCK_SIZE))]
        return fields


def _fields_of(owner: Owner) -> list[Field]:
    """The fields of an owner that lie in an arena: without tables and the page indices gathered from them."""
    elsewhere = (Length.TABLE, Length.PAGE)
    return [
        field
        for field in FIELDS.values()
        if field.owner is owner and field.length not in elsewhere and field.derive is None
    ]


def _viewer(memory: npt.NDArray[np.uint8]) -> Callable[[int, int, type[np.generic]], Any]:
    return lambda offset, length, dtype: memory[offset : offset + length * np.dtype(dtype).itemsize].view(dtype)
