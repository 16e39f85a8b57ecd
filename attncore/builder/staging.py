"""The arenas a step's metadata is written to: one block of memory each, used in turn.

On a CPU device that is all: arenas rotate and nothing is copied, but for the steps of a captured graph, which reads one
fixed place. There every arena is copied to one device arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT = 128  # bytes: a cache line of the widest device, and no two fields share one

Arrays = dict[str, npt.NDArray[Any]]


class Size(NamedTuple):
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

    def length(self, size: Size) -> int:
        return (
            self.per_token * size.num_tokens + self.per_request * size.num_reqs
            + self.per_encoder_token * size.num_encoder_tokens + self.extra
        )  # fmt: skip


# What every KV-cache group has of its own. Groups of one block size share page lists.
PAGE_FIELDS = (
    Field("paged_kv_indptr", np.int32, per_request=1, extra=1),
    Field("paged_kv_last_page_len", np.int32, per_request=1),
)
GROUP_FIELDS = (Field("slot_mapping", np.int64, per_token=1), Field("last_blocks", np.int32, per_request=1))
CROSS_FIELDS = (Field("slot_mapping", np.int64, per_encoder_token=1), Field("last_blocks", np.int32, per_request=1))

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


class Views(NamedTuple):
    """Arrays of one arena, laid out for one size: the step's own, and each group's (the cross group's last)."""

    fields: Arrays
    groups: list[Arrays]


class StagingRing:
    """``depth`` arenas for steps of at most ``size``; step k uses arena k % depth.

    ``block_sizes`` are those of the decoder groups' tables, ``has_cross`` adds a cross group. ``nbytes`` is what all
    arenas take. Where a field lies depends on the size of step alone, so that a captured graph finds it again.
    """

    def __init__(self, size: Size, block_sizes: Sequence[int], has_cross: bool, depth: int) -> None:
        self.size, self.depth = size, depth
        self._block_sizes, self._has_cross = tuple(block_sizes), has_cross
        self.arena_nbytes = self._layout(size)[1]
        self._memory = [_aligned(self.arena_nbytes) for _ in range(depth)]
        self._device: npt.NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        return self.arena_nbytes * (self.depth + (self._device is not None))

    def views(self, size: Size) -> list[Views]:
        """Every arena's arrays for steps of ``size``."""
        layout, _ = self._layout(size)
        return [self._views(memory, layout) for memory in self._memory]

    def device_views(self, size: Size) -> Views:
        """The device arena's arrays for steps of ``size``: where captured graphs read."""
        return self._views(self._device_memory(), self._layout(size)[0])

    def bytes_of(self, size: Size) -> tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]:
        """Every arena, and the device arena, as far as steps of ``size`` reach."""
        nbytes = self._layout(size)[1]
        return [memory[:nbytes] for memory in self._memory], self._device_memory()[:nbytes]

    def _device_memory(self) -> npt.NDArray[np.uint8]:
        if self._device is None:
            self._device = _aligned(self.arena_nbytes)
        return self._device

    def _layout(self, size: Size) -> tuple[list[tuple[int, Field, int, int]], int]:
        """(group or -1, field, offset, length) of every array, and where the last one ends; per-token fields first."""
        placed: list[tuple[int, Field]] = [(-1, field) for field in FIELDS]
        if self._has_cross:
            placed += [(-1, field) for field in ENCODER_FIELDS]
        for group, block_size in enumerate(self._block_sizes):
            placed += [(group, field) for field in GROUP_FIELDS]
            if self._block_sizes.index(block_size) == group:
                placed += [(group, field) for field in PAGE_FIELDS]
        if self._has_cross:
            placed += [(len(self._block_sizes), field) for field in CROSS_FIELDS + PAGE_FIELDS]
        placed.sort(key=lambda one: one[1].per_token == 0)
        layout, end = [], 0
        for group, field in placed:
            length = field.length(size)
            layout.append((group, field, end, length))
            end += -(-length * np.dtype(field.dtype).itemsize // ALIGNMENT) * ALIGNMENT
        return layout, end

    def _views(self, memory: npt.NDArray[np.uint8], layout: list[tuple[int, Field, int, int]]) -> Views:
        num_groups = len(self._block_sizes) + self._has_cross
        views = Views({}, [{} for _ in range(num_groups)])
        for group, field, offset, length in layout:
            array = memory[offset : offset + length * np.dtype(field.dtype).itemsize].view(field.dtype)
            (views.fields if group < 0 else views.groups[group])[field.name] = array
        for group, block_size in enumerate(self._block_sizes):
            owner = views.groups[self._block_sizes.index(block_size)]
            for field in PAGE_FIELDS:
                views.groups[group][field.name] = owner[field.name]
        return views


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]
