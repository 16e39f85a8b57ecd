"""The StepShapes of a builder (a StepShape is one size of step): eager ones by tokens, padded ones by captured size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore import arguments
from attncore.builder.device.arena import ArenaRing, Capacity, Views
from attncore.builder.device.captured_sizes import Bucket, CapturedSizes, of_size
from attncore.builder.fields import ACTUAL_COUNTS, COUNTS, Field
from attncore.builder.persistent.columns import Column, fill_from
from attncore.builder.persistent.group_backends import Backends
from attncore.builder.persistent.new_step_metadata import CLASSES_AT_CAPTURE, step_metadata
from attncore.builder.persistent.step_metadata import Owner, StepMetadata
from attncore.errors import CaptureError
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.device.by_copy import CopyTransport
    from attncore.builder.persistent.batch_core import BatchCore


SMALLEST = 256
"""Tokens of the smallest shape of an eager step on a device."""

_KEPT_BY_CAPTURE = (
    *(name for name in COUNTS if name != "use_cuda_graph"),
    *ACTUAL_COUNTS,
    "num_cross_slots",
    "req_ids",
    "moves",
)


def checked_bucket(name: str, value: Any) -> Bucket:
    """What a captured size is known by, as ints; TypeError or ValueError that begins with ``name``."""
    if not isinstance(value, tuple):
        return arguments.integer(name, value, 1)
    if len(value) != 2:
        raise ValueError(f"{name}: a tuple of {len(value)} found; give (num_reqs, num_tokens), or the requests alone")
    return arguments.integer(name, value[0], 1), arguments.integer(name, value[1], 1)


def _capture_of(bucket: Bucket) -> str:
    return f"capture({bucket[0]}, num_tokens={bucket[1]})" if isinstance(bucket, tuple) else f"capture({bucket})"


class _CapturedArena:
    """Stands in for an arena in the metadata that a graph was captured over: it has the counts of the capture, while
    the arrays are those of every later step.
    """

    def __init__(self, arena: Any, shape: Any, state: Any, owner: Owner) -> None:
        self.__dict__.update({name: getattr(arena, name) for name in _KEPT_BY_CAPTURE})
        self.original, self._shape, self._state, self._owner = arena, shape, state, owner

    @property
    def step(self) -> int:
        return self._owner.last_step

    @property
    def changes(self) -> int:
        return int(self._state.changes)

    def kept(self, group: str) -> dict[Any, Any] | None:
        """What the plan of the last step keeps for the layers of a group; None where that step is of another size."""
        for arena, metadata in zip(self._shape.arenas, self._shape.metadata, strict=True):
            if arena.step == self.step:
                found: dict[Any, Any] = metadata.groups[group].kept
                return found
        return None


class StepShapes:
    """The kernels' StepShapes of one builder, each with metadata for every arena of the ring.

    On a device with its own memory, an eager step takes the smallest of a few shapes that holds it, so that little is
    copied; a step padded to a captured size goes to the one place where its graph reads.
    """

    def __init__(
        self, core: BatchCore, ring: ArenaRing, backends: Backends, side: CopyTransport | None, owner: Owner,
        columns: Sequence[Column] = (),
    ) -> None:  # fmt: skip
        self._core, self._ring, self._backends, self._side, self._owner = core, ring, backends, side, owner
        self._columns = columns
        self.captured: CapturedSizes[Any] = CapturedSizes()
        self._eager: dict[Capacity, Any] = {}
        self._at_capture: dict[Bucket, StepMetadata] = {}
        self.by_bits: list[Any] = []
        """On a device: eager shapes without encoder tokens, by (tokens - 1).bit_length()."""

    def eager(self, num_tokens: int, num_encoder_tokens: int) -> Any:
        """The StepShape of an eager step of ``num_tokens`` tokens and ``num_encoder_tokens`` encoder tokens."""
        capacity = self._ring.capacity
        if self._side is not None:
            bits = (num_tokens - 1).bit_length() if num_tokens > 1 else 0
            if not num_encoder_tokens and bits < len(self.by_bits):
                return self.by_bits[bits]
            at_least = max(SMALLEST, 1 << max(num_tokens - 1, 0).bit_length())
            capacity = Capacity(
                min(at_least, capacity.num_tokens),
                capacity.num_reqs,
                capacity.num_encoder_tokens if num_encoder_tokens else 0,
            )
        shape = self._eager.get(capacity)
        if shape is None:
            shape = self._eager[capacity] = self._make(capacity)
        return shape

    def make_all(self) -> None:
        """Makes every shape of eager steps in advance."""
        most, num_tokens = self._ring.capacity, SMALLEST
        while True:
            for num_encoder_tokens in {0, most.num_encoder_tokens}:
                self.eager(min(num_tokens, most.num_tokens), num_encoder_tokens)
            if num_tokens >= most.num_tokens:
                break
            num_tokens *= 2
        if self._side is not None:
            bits = (most.num_tokens - 1).bit_length()
            self.by_bits = [self.eager(min(1 << k, most.num_tokens), 0) for k in range(bits + 1)]

    def find(self, bucket: Any) -> Any:
        """The StepShape of a captured size; CaptureError where it was not captured."""
        bucket = checked_bucket("bucket", bucket)
        shape = self.captured.get(bucket)
        if shape is None:
            self.captured.refuse(
                f"bucket: {bucket}",
                f"call builder.{_capture_of(bucket)} at start-up, or build without a bucket and run the step without a "
                "graph",
            )
        return shape

    def find_released(self, bucket: Any) -> Any:
        """The StepShape of a captured size that is to be released; CaptureError where it was not captured."""
        bucket = checked_bucket("num_reqs", bucket)
        shape = self.captured.get(bucket)
        if shape is None:
            self.captured.refuse(f"num_reqs: {bucket}", "there is nothing to release")
        return shape

    def capture(self, num_reqs: int, query_len: int, num_tokens: int | None = None) -> Any:
        """The StepShape of a size to capture; ValueError where a backend does not capture such steps."""
        if num_tokens is not None:
            return self._capture_tokens(num_reqs, num_tokens)
        known = self.captured.get(num_reqs)
        if known is not None:
            if known.query_len != query_len:
                raise ValueError(
                    f"query_len: the size of {counted(num_reqs, 'request')} was captured with "
                    f"{counted(known.query_len, 'token')} each, not "
                    f"{query_len}; call builder.release({num_reqs}) when that graph is gone"
                )
            return known
        level, name = self._backends.graph_level()
        if level == "never":
            raise ValueError(f"num_reqs: backend {name!r} cannot be captured in a graph; run its steps without")
        if query_len > 1 and level == "uniform_decode":
            raise ValueError(f"query_len: {query_len}, but backend {name!r} captures decodes of one token only")
        capacity = Capacity(num_reqs * query_len, num_reqs, 0)
        shape = self._make(capacity, True, num_reqs, query_len, self._backends.pad_seq_len, level != "always", 0)
        self.captured[num_reqs] = shape
        shape.bucket = num_reqs
        return shape

    def _capture_tokens(self, num_reqs: int, num_tokens: int) -> Any:
        """The StepShape of ``num_reqs`` rows that have so many tokens in all, each of any length."""
        bucket = num_reqs, num_tokens
        known = self.captured.get(bucket)
        if known is not None:
            return known
        level, name = self._backends.graph_level()
        if level != "always":
            raise ValueError(
                f"num_tokens: {num_tokens}, but backend {name!r} captures "
                + ("nothing" if level == "never" else "rows of one length alone")
                + f' (cuda_graph="{level}"); capture decodes, or run the step without a graph'
            )
        if self._core.states:
            raise ValueError(
                f"num_tokens: {num_tokens}, but group {next(iter(self._core.states))!r} holds states, which recurrent "
                "layers advance request by request; capture decodes alone"
            )
        capacity = Capacity(num_tokens, num_reqs, 0)
        pad_seq_len = self._backends.pad_seq_len
        shape = self._make(capacity, True, num_reqs, num_tokens, pad_seq_len, False, num_tokens)
        self.captured[bucket] = shape
        shape.bucket = bucket
        return shape

    def holding(self, arena: Any) -> Any:
        """The metadata of the step in ``arena``, a StepArena of the kernel's; None where its size was released."""
        for shape in (*self._eager.values(), *self.captured.entries()):
            for known, metadata in zip(shape.arenas, shape.metadata, strict=True):
                if known is arena:
                    return metadata
        return None

    def of(self, metadata: StepMetadata) -> Any:
        """The StepShape of a padded step; CaptureError where its size was released, and perhaps captured again."""
        own: Any = metadata._arena
        own = own.original if isinstance(own, _CapturedArena) else own
        for shape in self.captured.entries():
            if any(own is arena for arena in shape.arenas):
                return shape
        bucket: Any = metadata.num_reqs
        if metadata.num_tokens == metadata.max_query_len > max(metadata.num_reqs - 1, 1):  # rows of any lengths
            bucket = bucket, metadata.num_tokens
        gone = "released and captured again" if bucket in self.captured else "not captured"
        raise CaptureError(
            f"metadata: its size of {of_size(bucket)} was {gone}; builder.{_capture_of(bucket)} gives metadata of it"
        )

    def at_capture(self, metadata: StepMetadata) -> StepMetadata:
        """A captured size's ``metadata`` for a stand-in graph on the CPU: it keeps the counts of the capture.

        Its ``host`` arrays, too, are the fixed ones that every later step is copied to, and not those of an arena, and
        ``kept`` is that of the step, with its plan.
        """
        shape, side = self.of(metadata), self._side
        capacity = shape.capacity
        device: Any = side.views(capacity) if side is not None else self._ring.fixed_views(capacity)
        fields, *groups = (
            {name: np.asarray(array) for name, array in views.items()} for views in (device.fields, *device.groups)
        )
        arena = _CapturedArena(metadata._arena, shape, self._core.state, self._owner)
        kept = self._at_capture[shape.bucket] = step_metadata(
            arena, Views(fields, groups), self._core, self._backends.wraps, self._owner, self._extra(), device, side,
            padded=True, classes=CLASSES_AT_CAPTURE,
        )  # fmt: skip
        if self._core.spans is not None and isinstance(shape.bucket, tuple):
            kept.set_has_spans(None)
        return kept

    def forget_captured(self, bucket: Bucket) -> None:
        """Drops what a stand-in graph on the CPU keeps of its step, where the device has advanced that by itself."""
        if bucket in self._at_capture:
            self._at_capture[bucket].forget_step()

    def _make(self, capacity: Capacity, pads: bool = False, *padding: Any) -> Any:
        """Makes a StepShape.

        ``padding`` is the number of rows, the tokens of each, the ``seq_lens`` of padded rows, whether every request
        must run that many tokens, and how many they run in all.
        """
        core, ring, side = self._core, self._ring, self._side
        has_cross, extra = core.cross is not None, self._extra()
        device: Any = None
        memory: tuple[Any, ...] = ()
        if side is not None:
            device = side.views(capacity)
        elif pads:
            device, memory = ring.fixed_views(capacity), ring.bytes_of(capacity)
        arenas, metadata = [], []
        for views in ring.views(capacity):
            arenas.append(core.kernels.StepArena(views.fields, views.groups, capacity, has_cross))
            fill_from(self._columns, arenas[-1], views.fields)
            metadata.append(
                step_metadata(
                    arenas[-1], views, core, self._backends.wraps, self._owner, extra, device, side, padded=pads
                )
            )
        shape = core.kernels.StepShape(arenas, metadata, pads, *padding, *memory)
        shape.capacity, shape.tail = capacity, ring.journal_offset(capacity)
        if side is not None:
            shape.replay = side.prepare(capacity)
        return shape

    def _extra(self) -> Mapping[str, Field]:
        return {field.name: field for field in self._ring.extra}
