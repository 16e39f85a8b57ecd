"""Where captured graphs of the list builder read a step: arrays at fixed addresses, and the way there.

One block of memory holds them all. On a CPU a step is written to it; for another device it is written to a staging
block, pinned on CUDA, and sent in two or three copies that wait for nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore.builder.device.memory import Readers, aligned_bytes, aligned_up, device_bytes, pinned_bytes
from attncore.builder.fields import FIELDS, Length, Owner, named
from attncore.kernels.codes import PAD_SLOT_ID

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings

STAGING_DEPTH = 2

_STEP = frozenset((Owner.STEP, Owner.GROUP))
_SMALL = (Length.TOKEN, Length.REQUEST, Length.START)
"""Arrays of a decode of one token a row: an element a row, and one more."""
_FIXED = "token_to_req_indices"
"""Written once: row i is token i."""


def _arrays(owners: frozenset[Owner], *, padded: bool) -> tuple[str, ...]:
    """What a padded step has for every row that the graph was captured with, or for its own rows alone."""
    return tuple(name for name in named(*_SMALL, owners=owners) if FIELDS[name].list_pads is padded and name != _FIXED)


_PADDED, _UNPADDED = _arrays(_STEP, padded=True), _arrays(_STEP, padded=False)
_UNPADDED_ROWS = tuple(name for name in _UNPADDED if FIELDS[name].length is Length.REQUEST)
_PADDED_PAGES = _arrays(frozenset((Owner.BLOCK_SIZE,)), padded=True)
_ENCODER = _arrays(frozenset((Owner.ENCODER,)), padded=True)
_PADDED_ENCODER = tuple(name for name in _ENCODER if "query" not in name)
"""Decodes run no encoder tokens: the others stay 0."""


class _Place(NamedTuple):
    """Where one array lies, in bytes, and what it is."""

    offset: int
    dtype: type[np.generic]
    shape: tuple[int, ...]

    @property
    def row_nbytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def end(self) -> int:
        return self.offset + self.shape[0] * self.row_nbytes


class _Arena:
    """One block of memory with a step in it."""

    def __init__(self, memory: npt.NDArray[np.uint8], index: int) -> None:
        self.memory, self.index = memory, index
        self.tensor: Any = None
        """The same memory as a tensor, where it is copied from."""
        self.hosts: dict[int, SimpleNamespace] = {}
        self.rooms: dict[tuple[int, int], SimpleNamespace] = {}
        self.num_pages = 0
        """Entries of the page indices that may be other than 0."""


class GraphBuffers:
    """Fixed-address arrays for padded steps of up to ``max_batch_size`` decodes, as ``builder`` pads them.

    ``device`` is a torch device, or None for NumPy arrays. Arrays of a smaller size are views of the largest one's.
    """

    def __init__(self, settings: ListSettings, device: str | None, max_batch_size: int) -> None:
        assert settings.max_seq_len_to_capture is not None
        size, block = max_batch_size, settings.block_size
        self.max_batch_size = size
        self.has_pages, self.has_encoder = settings.dialect.page_lists, settings.encoder_decoder
        self.width = -(-settings.max_seq_len_to_capture // block)
        longest_encoder = settings.max_encoder_seq_len_to_capture or settings.max_seq_len_to_capture
        self.cross_width = -(-longest_encoder // block) if self.has_encoder else 0
        self.max_pages = size * self.width if self.has_pages else 0
        names = [*_PADDED, _FIXED, *_UNPADDED]
        names += _PADDED_PAGES if self.has_pages else ()
        names += _ENCODER if self.has_encoder else ()
        shapes: dict[str, tuple[int, ...]] = {name: (FIELDS[name].num_elements(size, size, 0),) for name in names}
        shapes["block_table"] = (size, self.width)  # behind the small fields: one copy takes both
        if self.has_encoder:
            shapes["cross_block_table"] = (size, self.cross_width)
        if self.has_pages:
            shapes["paged_kv_indices"] = (self.max_pages,)
        self._places: dict[str, _Place] = {}
        self.nbytes = 0
        for name, shape in shapes.items():
            place = self._places[name] = _Place(self.nbytes, FIELDS[name].dtype, shape)
            self.nbytes = aligned_up(place.end)
        self._device_name = device
        self._device: Any = None
        self._device_pages = 0
        self._next = 0
        self._arenas = self._allocate(device)
        self._readers = Readers(device or "cpu", len(self._arenas))

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that graphs read."""
        return tuple(self._places)

    def views(self, size: int) -> dict[str, Any]:
        """The arrays that a graph of ``size`` requests reads: tensors on the device, or NumPy arrays."""
        if self._device_name is None:
            return vars(self._host(self._arenas[0], size)).copy()
        import torch

        if self._device is None:
            return {name: torch.from_numpy(array) for name, array in vars(self._host(self._arenas[0], size)).items()}
        found = {}
        for name, place in self._places.items():
            dtype = torch.int64 if place.dtype is np.int64 else torch.int32
            found[name] = self._cut(name, self._device[place.offset : place.end].view(dtype).view(place.shape), size)
        if self.has_encoder:
            found["cross_slot_mapping"] = torch.empty(0, dtype=torch.int64, device=self._device_name)
        return found

    def write(self, step: Any, size: int) -> SimpleNamespace:
        """Brings the host arrays of a step that was padded to ``size`` here: whole rows, whole tails, padded rows too.

        Answers the same on the host. On CUDA nothing is waited for but an earlier copy out of the staging block that is
        written to.
        """
        arena = self._acquired()
        out, num_reqs = vars(self._host(arena, size)), len(step.query_lens)
        for name in _PADDED:
            out[name][...] = getattr(step, name)
        for name in _UNPADDED_ROWS:
            out[name][:num_reqs] = getattr(step, name)
        out["query_start_loc"][: num_reqs + 1] = step.query_start_loc
        out["block_table"][...] = step.block_table
        if self.has_encoder:
            for name in (*_PADDED_ENCODER, "cross_block_table"):
                out[name][...] = getattr(step, name)
        num_pages = 0
        if self.has_pages:
            for name in _PADDED_PAGES:
                out[name][...] = getattr(step, name)
            num_pages = len(step.paged_kv_indices)
            out["paged_kv_indices"][:num_pages] = step.paged_kv_indices
        return self._finished(arena, size, num_reqs, num_pages)

    def room(self, num_reqs: int, size: int, num_pages: int) -> SimpleNamespace:
        """Where a builder may write a step of ``num_reqs`` rows padded to ``size``; ``written`` is to follow."""
        arena = self._acquired()
        room = arena.rooms.get((size, num_reqs))
        if room is None:
            whole = vars(self._host(arena, size))
            room = arena.rooms[size, num_reqs] = SimpleNamespace(**whole)
            for name in _UNPADDED_ROWS:
                setattr(room, name, whole[name][:num_reqs])
            room.query_start_loc = whole["query_start_loc"][: num_reqs + 1]
        room = SimpleNamespace(**vars(room))
        if self.has_pages:
            room.paged_kv_indices = room.paged_kv_indices[:num_pages]
        return room

    def written(self, num_reqs: int, size: int, num_pages: int) -> SimpleNamespace:
        """Brings what was written to ``room`` where graphs read; answers as ``write``."""
        return self._finished(self._acquired(), size, num_reqs, max(num_pages, 0))

    def _finished(self, arena: _Arena, size: int, num_reqs: int, num_pages: int) -> SimpleNamespace:
        """Resets what the step's rows do not reach, and sends it all; the next step has the next staging block."""
        host = self._host(arena, size)
        self._next = (self._next + 1) % len(self._arenas)
        if num_reqs < size:
            for name in _UNPADDED_ROWS:
                getattr(host, name)[num_reqs:] = 0
            host.query_start_loc[num_reqs + 1 :] = num_reqs
        if num_pages < arena.num_pages:
            host.paged_kv_indices[num_pages : arena.num_pages] = 0
        arena.num_pages = num_pages
        if self._device is not None:
            self._send(arena, size, max(num_pages, self._device_pages))
            self._device_pages = num_pages
        return host

    def write_empty(self, size: int) -> SimpleNamespace:
        """A step of padding alone."""
        none, zeros = np.zeros(0, np.int32), np.zeros(size, np.int32)
        ones, sums = np.ones(size, np.int32), np.arange(size + 1, dtype=np.int32)
        step = SimpleNamespace(
            slot_mapping=np.full(size, PAD_SLOT_ID, np.int64),
            positions=zeros,
            seq_lens=ones,
            seq_start_loc=sums,
            context_lens=none,
            query_lens=none,
            logits_indices=none,
            query_start_loc=0,
            block_table=0,
            paged_kv_indptr=0,
            paged_kv_indices=none,
            paged_kv_last_page_len=0,
            encoder_seq_lens=ones,
            encoder_seq_start_loc=sums,
            cross_block_table=0,
        )
        return self.write(step, size)

    def _allocate(self, device: str | None) -> list[_Arena]:
        if device is None or device.startswith("cpu"):
            arenas = [_Arena(aligned_bytes(self.nbytes), 0)]
        else:
            import torch

            self._device = device_bytes(self.nbytes, device)
            depth = STAGING_DEPTH if device.startswith("cuda") else 1
            arenas = [_Arena(pinned_bytes(self.nbytes, device), index) for index in range(depth)]
            for arena in arenas:
                arena.tensor = torch.from_numpy(arena.memory)
        for arena in arenas:  # a decode of one token a row: this never changes
            vars(self._host(arena, self.max_batch_size))[_FIXED][...] = np.arange(self.max_batch_size)
        return arenas

    def _host(self, arena: _Arena, size: int) -> SimpleNamespace:
        found = arena.hosts.get(size)
        if found is None:
            found = arena.hosts[size] = SimpleNamespace()
            for name, place in self._places.items():
                array = arena.memory[place.offset : place.end].view(place.dtype).reshape(place.shape)
                setattr(found, name, self._cut(name, array, size))
            if self.has_encoder:
                found.cross_slot_mapping = np.zeros(0, np.int64)
        return found

    def _cut(self, name: str, array: Any, size: int) -> Any:
        length = FIELDS[name].length
        return array if length is Length.PAGE else array[: size + (length is Length.START)]

    def _acquired(self) -> _Arena:
        """The staging block that is next; on CUDA its last copy has been made."""
        arena = self._arenas[self._next]
        self._wait_for(arena)
        return arena

    def _wait_for(self, arena: _Arena) -> None:
        self._readers.wait(arena.index)

    def _send(self, arena: _Arena, size: int, num_pages: int) -> None:
        """Copies a step to the device, in the order of its current stream."""
        table, cross, pages = (
            self._places.get(name) for name in ("block_table", "cross_block_table", "paged_kv_indices")
        )
        assert table is not None
        spans = [(0, table.offset + size * table.row_nbytes)]
        if cross is not None:
            spans.append((cross.offset, cross.offset + size * cross.row_nbytes))
        if pages is not None and num_pages:
            spans.append((pages.offset, pages.offset + num_pages * pages.row_nbytes))
        pinned = len(self._arenas) > 1
        for start, stop in spans:
            self._device[start:stop].copy_(arena.tensor[start:stop], non_blocking=pinned)
        if pinned:
            self._record(arena)

    def _record(self, arena: _Arena) -> None:
        """Marks the end of the copies out of a staging block, on the stream that they were made on."""
        if self._device_name is not None and self._device_name.startswith("cuda"):
            import torch

            self._readers.record(arena.index, torch.cuda.current_stream(self._device_name))
