"""The arrays at fixed addresses that captured graphs of the list builder read, and how a step is written to them.

One block of memory holds all of them. On a CPU a step is written to it; for another device a step is written to a
staging block, pinned on CUDA, and sent in two or three asynchronous copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attncore.builder.device.memory import Readers, aligned_bytes, aligned_up, device_bytes, pinned_bytes
from attncore.builder.fields import FIELDS, Field, Length, Owner, Pad, named
from attncore.builder.slices import HostArrays, own_arrays

if TYPE_CHECKING:
    from attncore.builder.lists.settings import ListSettings

STAGING_DEPTH = 2

_STEP = frozenset((Owner.STEP, Owner.GROUP))
_SMALL = (Length.TOKEN, Length.REQUEST, Length.START)
"""Lengths of arrays that have an element per row, or one more, in a step of decodes of one token."""
_FIXED = "token_to_req_indices"
"""Written once: token i is of row i."""


def _arrays(owners: frozenset[Owner], *, padded: bool) -> tuple[str, ...]:
    """Arrays that a step has for every row of the graph (``padded``), or for its own rows only."""
    return tuple(name for name in named(*_SMALL, owners=owners) if FIELDS[name].list_pads is padded and name != _FIXED)


_PADDED, _UNPADDED = _arrays(_STEP, padded=True), _arrays(_STEP, padded=False)
_UNPADDED_ROWS = tuple(name for name in _UNPADDED if FIELDS[name].length is Length.REQUEST)
_PADDED_PAGES = _arrays(frozenset((Owner.BLOCK_SIZE,)), padded=True)
_ENCODER = _arrays(frozenset((Owner.ENCODER,)), padded=True)
_PADDED_ENCODER = tuple(name for name in _ENCODER if FIELDS[name].pad in (Pad.SEQ_LEN, Pad.GROW))
"""Those in which a padded row has a length. The others stay 0: decodes run no encoder tokens."""


def _pad_value(field: Field, bucket: int) -> Any:
    """What an array holds in a step of ``bucket`` padded rows and no others."""
    match field.pad:
        case Pad.SEQ_LEN:
            return 1
        case Pad.GROW:
            return np.arange(bucket + 1)
        case Pad.REPEAT:
            return 0
    return field.pad


class _Place(NamedTuple):
    """The offset of an array, in bytes, its dtype and shape."""

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
    """One block of memory that holds a step."""

    def __init__(self, memory: npt.NDArray[np.uint8], index: int) -> None:
        self.memory, self.index = memory, index
        self.tensor: Any = None
        """The same memory as a tensor, for copies to a device."""
        self.arrays: dict[int, dict[str, Any]] = {}
        """The arrays of each bucket, to write to."""
        self.reserved: dict[tuple[int, int], dict[str, Any]] = {}
        self.num_pages = 0
        """Leading page indices that may differ from 0."""


class GraphBuffers:
    """Arrays at fixed addresses for steps of up to ``max_batch_size`` decodes, padded as ``settings`` says.

    ``device`` is a torch device, or None for NumPy arrays. The arrays of a smaller bucket are views of those of the
    largest. Raises ValueError where ``settings`` has no ``max_seq_len_to_capture``.
    """

    def __init__(self, settings: ListSettings, device: str | None, max_batch_size: int) -> None:
        if settings.max_seq_len_to_capture is None:
            raise ValueError("builder: made without max_seq_len_to_capture, which says how long captured sequences get")
        most, block_size = max_batch_size, settings.block_size
        self.max_batch_size = most
        self.has_pages, self.has_encoder = settings.dialect.page_lists, settings.encoder_decoder
        self.width = -(-settings.max_seq_len_to_capture // block_size)
        longest_encoder = settings.max_encoder_seq_len_to_capture or settings.max_seq_len_to_capture
        self.cross_width = -(-longest_encoder // block_size) if self.has_encoder else 0
        self.max_pages = most * self.width if self.has_pages else 0
        names = [*_PADDED, _FIXED, *_UNPADDED]
        names += _PADDED_PAGES if self.has_pages else ()
        names += _ENCODER if self.has_encoder else ()
        shapes: dict[str, tuple[int, ...]] = {name: (FIELDS[name].num_elements(most, most, 0),) for name in names}
        shapes["block_table"] = (most, self.width)  # behind the small fields: one copy takes both
        if self.has_encoder:
            shapes["cross_block_table"] = (most, self.cross_width)
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
        """The arrays that graphs read; ``cross_slot_mapping`` is empty, for decodes run no encoder tokens."""
        return (*self._places, "cross_slot_mapping") if self.has_encoder else tuple(self._places)

    def views(self, bucket: int) -> dict[str, Any]:
        """The tensors that a graph of ``bucket`` requests reads; none where it reads the host's arrays."""
        if self._device_name is None:
            return {}
        import torch

        if self._device is None:
            return {name: torch.from_numpy(array) for name, array in self._arrays(self._arenas[0], bucket).items()}
        views = {}
        for name, place in self._places.items():
            dtype = torch.int64 if place.dtype is np.int64 else torch.int32
            views[name] = self._cut(name, self._device[place.offset : place.end].view(dtype).view(place.shape), bucket)
        if self.has_encoder:
            views["cross_slot_mapping"] = torch.empty(0, dtype=torch.int64, device=self._device_name)
        return views

    def copies(self, step: Any, bucket: int) -> list[tuple[Any, Any]]:
        """What ``write`` writes of ``step``, arrays of one that was padded to ``bucket``, padded rows included: arrays
        of the buffers, and those that are copied to them.

        On CUDA it waits only for an earlier copy out of the same staging block. ValueError for an array of another
        shape, which a caller has set.
        """
        out, num_seqs = self._arrays(self._acquire(), bucket), len(step.query_lens)
        targets = {name: out[name] for name in (*_PADDED, "block_table")}
        targets |= {name: out[name][:num_seqs] for name in _UNPADDED_ROWS}
        targets["query_start_loc"] = out["query_start_loc"][: num_seqs + 1]
        if self.has_encoder:
            targets |= {name: out[name] for name in (*_PADDED_ENCODER, "cross_block_table")}
        if self.has_pages:
            targets |= {name: out[name] for name in _PADDED_PAGES}
            targets["paged_kv_indices"] = out["paged_kv_indices"][: max(step.paged_kv_indptr[-1:], default=0)]
        sources = vars(step)
        for name, target in targets.items():
            found = getattr(sources.get(name), "shape", None)
            if found != target.shape:
                raise ValueError(
                    f"metadata: its {name} has the shape {found}, not {target.shape} as it was built; build the step "
                    "anew, for metadata is read-only"
                )
        return [(target, sources[name]) for name, target in targets.items()]

    def write(self, step: Any, bucket: int, copies: list[tuple[Any, Any]]) -> HostArrays:
        """Writes a step, of which ``copies`` tells the arrays, and sends it; returns the same arrays on the host."""
        arena = self._arenas[self._next]  # which ``copies`` has waited for
        num_pages = len(step.paged_kv_indices) if self.has_pages else 0
        arena.num_pages = max(arena.num_pages, num_pages)  # before: an interrupted step leaves some of them
        for target, source in copies:
            target[...] = source
        return self._finish(arena, bucket, len(step.query_lens), num_pages)

    def reserve(self, num_seqs: int, bucket: int, num_pages: int) -> HostArrays:
        """Host arrays for a builder to write a step of ``num_seqs`` rows padded to ``bucket`` to, before ``commit``."""
        arena = self._acquire()
        arrays = arena.reserved.get((bucket, num_seqs))
        if arrays is None:
            arrays = self._arrays(arena, bucket).copy()
            for name in _UNPADDED_ROWS:
                arrays[name] = arrays[name][:num_seqs]
            arrays["query_start_loc"] = arrays["query_start_loc"][: num_seqs + 1]
            arena.reserved[bucket, num_seqs] = arrays
        host = HostArrays(**arrays)
        if self.has_pages:
            own_arrays(host).paged_kv_indices = arrays["paged_kv_indices"][:num_pages]
            arena.num_pages = max(arena.num_pages, num_pages)
        return host

    def commit(self, num_seqs: int, bucket: int, num_pages: int) -> HostArrays:
        """Sends what was written to the arrays of ``reserve``; returns the host arrays, as ``write`` does."""
        return self._finish(self._acquire(), bucket, num_seqs, max(num_pages, 0))

    def _finish(self, arena: _Arena, bucket: int, num_seqs: int, num_pages: int) -> HostArrays:
        """Resets what the step's rows leave, and sends the block; the next step takes the next staging block."""
        arrays = self._arrays(arena, bucket)
        self._next = (self._next + 1) % len(self._arenas)
        if num_seqs < bucket:
            for name in _UNPADDED_ROWS:
                arrays[name][num_seqs:] = 0
            arrays["query_start_loc"][num_seqs + 1 :] = num_seqs
        if num_pages < arena.num_pages:
            arrays["paged_kv_indices"][num_pages : arena.num_pages] = 0
        arena.num_pages = num_pages
        if self._device is not None:
            self._device_pages = max(num_pages, self._device_pages)
            self._send(arena, bucket, self._device_pages)
            self._device_pages = num_pages
        return HostArrays(**arrays)  # whoever gets it may set its fields

    def write_empty(self, bucket: int) -> HostArrays:
        """Writes an empty step: padded rows only."""
        arena = self._acquire()
        arrays = self._arrays(arena, bucket)
        for name in self._places:
            if name not in (_FIXED, "paged_kv_indices"):  # constant, and reset where they were in use
                arrays[name][...] = _pad_value(FIELDS[name], bucket)
        return self._finish(arena, bucket, 0, 0)

    def _allocate(self, device: str | None) -> list[_Arena]:
        if device is None or device.startswith("cpu"):
            arenas = [_Arena(aligned_bytes(self.nbytes), 0)]
        else:
            import torch

            self._device = device_bytes(self.nbytes, device)
            depth = STAGING_DEPTH if device.startswith("cuda") else 1
            lower = "max_batch_size or max_seq_len_to_capture"
            arenas = [_Arena(pinned_bytes(self.nbytes, device, lower), index) for index in range(depth)]
            for arena in arenas:
                arena.tensor = torch.from_numpy(arena.memory)
        for arena in arenas:  # constant, since every row is a decode of one token
            self._arrays(arena, self.max_batch_size)[_FIXED][...] = np.arange(self.max_batch_size)
        return arenas

    def _arrays(self, arena: _Arena, bucket: int) -> dict[str, Any]:
        arrays = arena.arrays.get(bucket)
        if arrays is None:
            arrays = {}
            for name, place in self._places.items():
                array = arena.memory[place.offset : place.end].view(place.dtype).reshape(place.shape)
                arrays[name] = self._cut(name, array, bucket)
            if self.has_encoder:
                arrays["cross_slot_mapping"] = np.zeros(0, np.int64)
            arena.arrays[bucket] = arrays  # now that it has all of them
        return arrays

    def _cut(self, name: str, array: Any, bucket: int) -> Any:
        length = FIELDS[name].length
        return array if length is Length.PAGE else array[: bucket + (length is Length.START)]

    def _acquire(self) -> _Arena:
        """The next staging block; on CUDA, after its last copy is complete."""
        arena = self._arenas[self._next]
        self._wait_for(arena)
        return arena

    def _wait_for(self, arena: _Arena) -> None:
        self._readers.wait(arena.index)

    def _send(self, arena: _Arena, bucket: int, num_pages: int) -> None:
        """Copies a step to the device, on its current stream."""
        table = self._places["block_table"]
        cross, pages = self._places.get("cross_block_table"), self._places.get("paged_kv_indices")
        spans = [(0, table.offset + bucket * table.row_nbytes)]
        if cross is not None:
            spans.append((cross.offset, cross.offset + bucket * cross.row_nbytes))
        if pages is not None and num_pages:
            spans.append((pages.offset, pages.offset + num_pages * pages.row_nbytes))
        pinned = len(self._arenas) > 1
        for start, stop in spans:
            self._device[start:stop].copy_(arena.tensor[start:stop], non_blocking=pinned)
        if pinned:
            self._record(arena)

    def _record(self, arena: _Arena) -> None:
        """Marks the end of the copies out of a staging block, on the stream of these copies."""
        if self._device_name is not None and self._device_name.startswith("cuda"):
            import torch

            self._readers.record(arena.index, torch.cuda.current_stream(self._device_name))
