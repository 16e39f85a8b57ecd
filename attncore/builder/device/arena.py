"""The arenas a step's metadata is written to: one block of memory each, used in turn.

On a CPU device that is all: arenas rotate and nothing is copied, but for the steps of a captured graph, which reads one
fixed place. On a GPU the arenas are pinned, and builder/device/by_copy.py brings each to the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT = 128  # bytes: a cache line of the widest device, and no two fields share one

Arrays = dict[str, npt.NDArray[Any]]


class Capacity(NamedTuple):
    """How large a step an arena is laid out for."""

    num_tokens: int
    num_reqs: int
    num_encoder_tokens: int = 0


class Field(NamedTuple):
    """One array of an arena: so many elements a token, a request, an encoder token, and so many more."""

    name: str
    dtype: type[np.generic]
    per_token: int = 0
    per_request: int = 0
    per_encoder_token: int = 0
    extra: int = 0

    def length(self, size: Capacity) -> int:
        return (
            self.per_token * size.num_tokens + self.per_request * size.num_reqs
            + self.per_encoder_token * size.num_encoder_tokens + self.extra
        )  # fmt: skip


# What every KV-cache group has of its own. Groups of one block size share page lists.
PAGE_FIELDS = (
    Field("paged_kv_indptr", np.int32, per_request=1, extra=1),
    Field("paged_kv_last_page_len", np.int32, per_request=1),
)
GROUP_FIELDS = (Field("slot_mapping", np.int64, per_token=1),)
CROSS_FIELDS = (Field("slot_mapping", np.int64, per_encoder_token=1),)

FIELDS = (
    Field("positions", np.int64, per_token=1),
    Field("token_to_req_indices", np.int32, per_token=1),
    Field("seq_lens", np.int32, per_request=1),
    Field("context_lens", np.int32, per_request=1),
    Field("query_lens", np.int32, per_request=1),
    Field("logits_indices", np.int32, per_request=1),
    Field("query_start_loc", np.int32, per_request=1, extra=1),
    Field("seq_start_loc", np.int32, per_request=1, extra=1),
    Field("prefill_query_start_loc", np.int32, per_request=1, extra=1),
    Field("prefill_seq_start_loc", np.int32, per_request=1, extra=1),
)
ENCODER_FIELDS = (
    Field("encoder_seq_lens", np.int32, per_request=1),
    Field("encoder_query_lens", np.int32, per_request=1),
    Field("encoder_seq_start_loc", np.int32, per_request=1, extra=1),
    Field("encoder_query_start_loc", np.int32, per_request=1, extra=1),
)

HEADER_WORDS = 80
"""int64 words before the first field: the step's number, its rows and tokens, and each group's journal entries."""
STEP, ROWS, TOKENS, COUNTS = range(4)
HEADER_NBYTES = HEADER_WORDS * 8
JOURNAL_ENTRY = 8  # bytes: a flat index of the table and a block id


class Views(NamedTuple):
    """Arrays of one arena, laid out for one size: the step's own, and each group's (the cross group's last)."""

    fields: dict[str, Any]
    groups: list[dict[str, Any]]


class _Placed(NamedTuple):
    group: int
    """-1: the step's own."""
    field: Field
    offset: int
    length: int


class ArenaRing:
    """``depth`` arenas for steps of at most ``size``; step k uses arena k % depth.

    ``block_sizes`` are those of the decoder groups' tables, ``has_cross`` adds a cross group, ``extra`` fields are the
    engine's own. Where a field lies depends on the size of step alone, so that a captured graph finds it again; a
    journal of at most ``journal_entries`` follows the fields. ``allocate`` gives so many bytes of host memory, aligned;
    ``nbytes`` is what all of them take.
    """

    def __init__(
        self,
        size: Capacity,
        block_sizes: Sequence[int],
        has_cross: bool,
        depth: int,
        *,
        extra: Sequence[Field] = (),
        journal_entries: int = 0,
        allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        self.size, self.depth, self.journal_entries = size, depth, journal_entries
        self._block_sizes, self._has_cross, self.extra = tuple(block_sizes), has_cross, tuple(extra)
        self._layouts: dict[Capacity, tuple[list[_Placed], int]] = {}
        self.arena_nbytes = self.journal_offset(size) + journal_entries * JOURNAL_ENTRY
        self.arena_nbytes = -(-self.arena_nbytes // ALIGNMENT) * ALIGNMENT
        memory = (allocate or _aligned)(self.arena_nbytes * depth)
        self.memory = [memory[k * self.arena_nbytes : (k + 1) * self.arena_nbytes] for k in range(depth)]
        self._fixed: npt.NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        return self.arena_nbytes * (self.depth + (self._fixed is not None))

    def views(self, size: Capacity) -> list[Views]:
        """Every arena's arrays for steps of ``size``."""
        return [self.views_of(size, _viewer(memory)) for memory in self.memory]

    def fixed_views(self, size: Capacity) -> Views:
        """The arrays, for steps of ``size``, of the one place in host memory where captured graphs read."""
        return self.views_of(size, _viewer(self._fixed_memory()))

    def bytes_of(self, size: Capacity) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]:
        """Every arena, and the fixed place, as far as steps of ``size`` reach."""
        nbytes = self.journal_offset(size)
        return [memory[:nbytes] for memory in self.memory], self._fixed_memory()[:nbytes]

    def journal_offset(self, size: Capacity) -> int:
        """Where the journal of a step of ``size`` begins, bytes: behind the last field."""
        return self._layout(size)[1]

    def header(self, arena: int) -> npt.NDArray[np.int64]:
        """int64[HEADER_WORDS] of an arena."""
        return self.memory[arena][:HEADER_NBYTES].view(np.int64)

    def slots_range(self, size: Capacity) -> tuple[int, int]:
        """Where the slots of all decoder groups begin and end, bytes."""
        slots = [one for one in self._layout(size)[0] if one.field.name == "slot_mapping" and one.field.per_token]
        return slots[0].offset, slots[-1].offset + 8 * slots[-1].length

    def places(self, size: Capacity) -> dict[tuple[int, str], int]:
        """Where each array of a step of ``size`` begins, in int32 words, by group (-1: the step's own) and name."""
        return {(one.group, one.field.name): one.offset // 4 for one in self._layout(size)[0]}

    @property
    def page_owners(self) -> list[int]:
        """Decoder groups whose page lists are their own; the others share those of an earlier one."""
        sizes = self._block_sizes
        return [group for group, size in enumerate(sizes) if sizes.index(size) == group]

    def addresses(self) -> npt.NDArray[np.int64]:
        """Where each arena is, int64[depth]."""
        return np.array([memory.ctypes.data for memory in self.memory], np.int64)

    def views_of(self, size: Capacity, view: Callable[[int, int, type[np.generic]], Any]) -> Views:
        """Fields for steps of ``size`` made by ``view(offset, length, dtype)``."""
        views = Views({}, [{} for _ in range(len(self._block_sizes) + self._has_cross)])
        for group, field, offset, length in self._layout(size)[0]:
            (views.fields if group < 0 else views.groups[group])[field.name] = view(offset, length, field.dtype)
        for group, block_size in enumerate(self._block_sizes):
            owner = views.groups[self._block_sizes.index(block_size)]
            for field in PAGE_FIELDS:
                views.groups[group][field.name] = owner[field.name]
        return views

    def _fixed_memory(self) -> npt.NDArray[np.uint8]:
        if self._fixed is None:
            self._fixed = _aligned(self.arena_nbytes)
        return self._fixed

    def _layout(self, size: Capacity) -> tuple[list[_Placed], int]:
        """Where every array lies, per-token fields first, and where the last one ends."""
        if size not in self._layouts:
            placed, end = [], HEADER_NBYTES
            # Slots stand together behind the other per-token fields, so that one stretch of -1 clears them.
            for group, field in sorted(self._fields(), key=lambda one: (one[1].per_token == 0, one[0] >= 0)):
                length = field.length(size)
                placed.append(_Placed(group, field, end, length))
                end += -(-length * np.dtype(field.dtype).itemsize // ALIGNMENT) * ALIGNMENT
            self._layouts[size] = placed, end
        return self._layouts[size]

    def _fields(self) -> list[tuple[int, Field]]:
        fields = [(-1, field) for field in (*FIELDS, *self.extra)]
        if self._has_cross:
            fields += [(-1, field) for field in ENCODER_FIELDS]
        for group, block_size in enumerate(self._block_sizes):
            fields += [(group, field) for field in GROUP_FIELDS]
            if self._block_sizes.index(block_size) == group:
                fields += [(group, field) for field in PAGE_FIELDS]
        if self._has_cross:
            fields += [(len(self._block_sizes), field) for field in CROSS_FIELDS + PAGE_FIELDS]
        return fields


def _viewer(memory: npt.NDArray[np.uint8]) -> Callable[[int, int, type[np.generic]], Any]:
    return lambda offset, length, dtype: memory[offset : offset + length * np.dtype(dtype).itemsize].view(dtype)


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]
