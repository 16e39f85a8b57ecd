"""The sizes of step that graphs were captured for: padding, fixed addresses, and the way there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore import arguments
from attncore.builder.device.arena import ArenaRing, Capacity, Views
from attncore.builder.persistent.backends import Backends
from attncore.builder.persistent.step_metadata import Owner, StepMetadata, step_metadata
from attncore.errors import CaptureError

if TYPE_CHECKING:
    from attncore.builder.device.by_copy import DeviceSide
    from attncore.builder.persistent.input_batch import InputBatch


SMALLEST = 256  # tokens that the smallest size of an eager step holds on a device
_COUNTS = (
    "num_reqs", "num_tokens", "num_actual_reqs", "num_actual_tokens", "num_decodes", "num_decode_tokens",
    "num_prefills", "num_prefill_tokens", "max_query_len", "max_seq_len", "max_prefill_seq_len", "max_decode_seq_len",
    "max_decode_query_len", "num_encoder_tokens", "max_encoder_seq_len", "num_cross_slots", "req_ids", "moves",
)  # fmt: skip


class _Capture:
    """What an arena is to metadata, for what a graph was captured over: counts of the capture, arrays of any step."""

    def __init__(self, arena: Any, rows: Any, owner: Owner) -> None:
        self.__dict__.update({name: getattr(arena, name) for name in _COUNTS})
        self._rows, self._owner = rows, owner

    @property
    def step(self) -> int:
        return self._owner.last_step

    @property
    def changes(self) -> int:
        return int(self._rows.changes)


class Buckets:
    """The sizes that arenas are laid out for: steps as they come, and captured sizes by their number of requests.

    On a device with its own memory, steps as they come are sorted into a few sizes, so that little is copied; a step
    padded to a captured size is brought to the one place where its graph reads.
    """

    def __init__(
        self, batch: InputBatch, ring: ArenaRing, backends: Backends, side: DeviceSide | None, owner: Owner
    ) -> None:
        self._owner = owner
        self._batch, self._ring, self._backends, self._side = batch, ring, backends, side
        self._eager: dict[Capacity, Any] = {}
        self._captured: dict[int, Any] = {}
        self._by_bits: list[Any] = []  # on a device: eager sizes without an encoder, by bits of their tokens less one

    def __iter__(self) -> Iterator[int]:
        return iter(self._captured)

    def eager(self, num_tokens: int, num_encoder_tokens: int) -> Any:
        """The StepShape of a step of so many tokens."""
        size = self._ring.size
        if self._side is not None:
            bits = (num_tokens - 1).bit_length() if num_tokens > 1 else 0
            if not num_encoder_tokens and bits < len(self._by_bits):
                return self._by_bits[bits]
            at_least = max(SMALLEST, 1 << max(num_tokens - 1, 0).bit_length())
            size = Capacity(
                min(at_least, size.num_tokens), size.num_reqs, size.num_encoder_tokens if num_encoder_tokens else 0
            )
        bucket = self._eager.get(size)
        if bucket is None:
            bucket = self._eager[size] = self._made(size)
        return bucket

    def make_all(self) -> None:
        """Lays out every size of steps as they come, so that no step has to."""
        num_tokens = SMALLEST
        while True:
            for num_encoder_tokens in {0, self._ring.size.num_encoder_tokens}:
                self.eager(min(num_tokens, self._ring.size.num_tokens), num_encoder_tokens)
            if num_tokens >= self._ring.size.num_tokens:
                break
            num_tokens *= 2
        if self._side is not None:
            bits = (self._ring.size.num_tokens - 1).bit_length()
            self._by_bits = [self.eager(min(1 << k, self._ring.size.num_tokens), 0) for k in range(bits + 1)]

    def find(self, num_reqs: int) -> Any:
        """The kernels' StepShape of a captured size."""
        num_reqs = arguments.integer("bucket", num_reqs, 1)
        bucket = self._captured.get(num_reqs)
        if bucket is None:
            known = ", ".join(map(str, sorted(self._captured))) or "none"
            raise CaptureError(
                f"bucket: {num_reqs} was not captured (captured: {known}); call builder.capture({num_reqs}) at "
                "start-up, or build without a bucket and run the step without a graph"
            )
        return bucket

    def add(self, num_reqs: int, query_len: int) -> Any:
        """The StepShape of a size to capture; ValueError where the backend captures no such steps."""
        if num_reqs in self._captured:
            found = self._captured[num_reqs].query_len
            if found != query_len:
                raise ValueError(
                    f"query_len: {num_reqs} requests were captured with {found} tokens each, not {query_len}; "
                    f"call builder.release({num_reqs}) when that graph is gone"
                )
            return self._captured[num_reqs]
        level, name = self._backends.graph_level()
        if level == "never":
            raise ValueError(f"num_reqs: backend {name!r} cannot be captured in a graph; run its steps without")
        if query_len > 1 and level == "uniform_decode":
            raise ValueError(f"query_len: {query_len}, but backend {name!r} captures decodes of one token only")
        size = Capacity(num_reqs * query_len, num_reqs, 0)
        bucket = self._made(size, True, num_reqs, query_len, self._backends.pad_seq_len, level != "always")
        self._captured[num_reqs] = bucket
        return bucket

    def _made(self, size: Capacity, pads: bool = False, *padding: Any) -> Any:
        """A StepShape; ``padding``: rows, tokens of each, their seq_lens, whether all run so many."""
        batch, ring, side = self._batch, self._ring, self._side
        has_cross = batch._cross is not None
        extra = self._extra()
        device: Any = None
        memory: tuple[Any, ...] = ()
        if side is not None:
            device = side.views(size)
        elif pads:
            device, memory = ring.fixed_views(size), ring.bytes_of(size)
        arenas, metadata = [], []
        for views in ring.views(size):
            arenas.append(batch.kernels.StepArena(views.fields, views.groups, has_cross))
            metadata.append(
                step_metadata(
                    arenas[-1], views, batch, self._backends.wraps, self._owner, extra, device, side, padded=pads
                )
            )
        bucket = batch.kernels.StepShape(arenas, metadata, pads, *padding, *memory)
        bucket.size, bucket.tail = size, ring.journal_offset(size)
        if side is not None:
            bucket.replay = side.prepare(size)
        return bucket

    def _extra(self) -> dict[str, str]:
        return {field.name: "token" if field.per_token else "request" for field in self._ring.extra}

    def at_capture(self, metadata: StepMetadata) -> StepMetadata:
        """A captured size's ``metadata`` as a stand-in for a graph, on the CPU, replays it: counts of the capture.

        Its ``host``, too, lies where every later step comes to, and not in one of the arenas.
        """
        size, side = self.of(metadata).size, self._side
        device: Any = side.views(size) if side is not None else self._ring.fixed_views(size)
        fields, *groups = (
            {name: np.asarray(array) for name, array in views.items()} for views in (device.fields, *device.groups)
        )
        arena = _Capture(metadata._arena, self._batch._rows, self._owner)
        return step_metadata(
            arena, Views(fields, groups), self._batch, self._backends.wraps, self._owner, self._extra(), device, side,
            padded=True,
        )  # fmt: skip

    def drop(self, num_reqs: int) -> Any:
        """Forgets a captured size; its StepShape."""
        return self._captured.pop(num_reqs)

    def of(self, metadata: StepMetadata) -> Any:
        """The StepShape of a step that was padded."""
        return self._captured[metadata.num_reqs]
