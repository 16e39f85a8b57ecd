"""The sizes of step that graphs were captured for: padding, fixed addresses, and the way there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attncore import slots
from attncore.builder.backends import Backends
from attncore.builder.staging import Size, StagingRing
from attncore.builder.step_metadata import step_metadata
from attncore.errors import CaptureError

if TYPE_CHECKING:
    from attncore.builder.input_batch import InputBatch


class Buckets:
    """Captured sizes by their number of requests. A step in one is padded to it and brought to the device arena."""

    def __init__(self, batch: InputBatch, ring: StagingRing, backends: Backends) -> None:
        self._batch, self._ring, self._backends = batch, ring, backends
        self._buckets: dict[int, Any] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._buckets)

    def find(self, num_reqs: int) -> Any:
        """The kernels' StepBucket of a captured size."""
        num_reqs = slots._integer("bucket", num_reqs, 1)
        bucket = self._buckets.get(num_reqs)
        if bucket is None:
            known = ", ".join(map(str, sorted(self._buckets))) or "none"
            raise CaptureError(
                f"bucket: {num_reqs} was not captured (captured: {known}); call builder.capture({num_reqs}) at "
                "start-up, or build without a bucket and run the step without a graph"
            )
        return bucket

    def add(self, num_reqs: int, query_len: int) -> Any:
        """The StepBucket of a size to capture; ValueError where the backend captures no such steps."""
        if num_reqs in self._buckets:
            found = self._buckets[num_reqs].query_len
            if found != query_len:
                raise ValueError(
                    f"query_len: {num_reqs} requests were captured with {found} tokens each, not {query_len}"
                )
            return self._buckets[num_reqs]
        level, name = self._backends.graph_level()
        if level == "never":
            raise ValueError(f"num_reqs: backend {name!r} cannot be captured in a graph; run its steps without")
        if query_len > 1 and level == "uniform_decode":
            raise ValueError(f"query_len: {query_len}, but backend {name!r} captures decodes of one token only")
        batch, ring = self._batch, self._ring
        size = Size(num_reqs * query_len, num_reqs, 0)
        device = ring.device_views(size)
        arenas, metadata = [], []
        for views in ring.views(size):
            arenas.append(batch.kernels.StepArena(views.fields, views.groups, batch._cross is not None))
            metadata.append(step_metadata(arenas[-1], views, batch, self._backends.wraps, device))
        uniform = level != "always"
        sources, target = ring.bytes_of(size)
        self._buckets[num_reqs] = batch.kernels.StepBucket(
            arenas, metadata, True, num_reqs, query_len, self._backends.pad_seq_len, uniform, sources, target
        )
        return self._buckets[num_reqs]
