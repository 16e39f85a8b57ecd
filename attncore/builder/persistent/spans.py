"""Spans of a batch's requests, whose tokens see each other in both directions, and the field of each step from them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attncore.builder.blocks.spans import NONE, cut_span, write_ends
from attncore.builder.device.memory import zeros
from attncore.builder.fields import FIELDS
from attncore.builder.slices import own_array
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.persistent.batch_core import BatchCore
    from attncore.builder.persistent.group_backends import Backends
    from attncore.builder.persistent.settings import Settings
    from attncore.builder.persistent.step_metadata import StepMetadata

_INT32 = npt.NDArray[np.int32]

FEATURE = "bidirectional_spans"


class Spans:
    """The spans of each request, by its place, so that they stay its own while its row changes."""

    field = FIELDS["span_ends"]

    def __init__(self, core: BatchCore) -> None:
        self._core = core
        self._of: dict[int, _INT32] = {}
        self._last = zeros(core.max_num_reqs, np.int32)
        """By place: where the last span ends; 0: the request has none."""

    def run(self, bucket: Any) -> bool:
        """Whether the next step may have spans, or is padded to a captured size of tokens, which has the field always.

        The steps of requests whose spans are all computed are built by the shorter ways, which do not look at spans.
        """
        if isinstance(bucket, tuple):
            return True
        if not self._of:
            return False
        core = self._core
        core.settle()  # what an interrupted call has counted as computed is not
        rows = slice(len(core.order.req_ids))
        return bool((self._last[core.places(rows)] > core.lengths[codes.COMPUTED, rows]).any())

    @property
    def nbytes(self) -> int:
        return int(self._last.nbytes + sum(spans.nbytes for spans in self._of.values()))

    def of_row(self, row: int) -> _INT32:
        """int32[n, 2]: the spans of the row's request."""
        return self._of.get(self._place(row), NONE)

    def put(self, row: int, spans: _INT32) -> None:
        """Makes these, which are checked, the spans of the row's request; a roll-back brings back those before."""
        place = self._place(row)
        self._core.undo.append((self._put, place, self._of.get(place, NONE)))
        self._put(place, spans)
        self._core.state.dirty = True  # a build that is about to take a short way, and has looked already, does not

    def _put(self, place: int, spans: _INT32) -> None:
        if len(spans):
            self._last[place] = spans[-1, 1]
            self._of[place] = spans
        else:
            self._last[place] = 0
            self._of.pop(place, None)

    def _place(self, row: int) -> int:
        return int(self._core.lengths[codes.PLACE, row])

    def fill(self, metadata: StepMetadata, bucket: Any, trees: Collection[Hashable]) -> None:
        """Writes ``span_ends`` of a step; it has none where no token of it is in a span, but for a captured size of
        tokens, whose graph reads the field whatever runs.

        ``trees``: the requests that run one. ValueError where one of these has a span in the step, where that cuts a
        span, and where it is padded to a captured size of decodes, which read none.
        """
        num_reqs = len(metadata.req_ids)
        of_tokens = isinstance(bucket, tuple)
        rows: list[int] = []
        if self._of:
            contexts = own_array(metadata.host, "context_lens")[:num_reqs]
            stops = contexts + own_array(metadata.host, "query_lens")[:num_reqs]
            left = np.flatnonzero(self._last[self._core.places(slice(num_reqs))] > contexts).tolist()
            rows = [row for row in left if self._in_step(metadata, row, int(contexts[row]), int(stops[row]), trees)]
        if rows and bucket is not None and not of_tokens:
            raise ValueError(
                f"bucket: {bucket}, but request {quoted(metadata.req_ids[rows[0]])} runs a span in this step, and "
                "graphs of decodes are captured without any; build without a bucket, or for a size captured with "
                "num_tokens"
            )
        metadata.set_has_spans(bool(rows) or of_tokens)
        if not rows and not of_tokens:
            return
        out, starts = own_array(metadata.host, "span_ends"), own_array(metadata.host, "query_start_loc")
        out[:] = 0
        for row in rows:
            write_ends(self.of_row(row), int(contexts[row]), out[starts[row] : starts[row + 1]])

    def _in_step(self, metadata: StepMetadata, row: int, first: int, stop: int, trees: Collection[Hashable]) -> bool:
        """Whether tokens ``first:stop`` of a row hold a span; ValueError where they cut one."""
        spans = self.of_row(row)
        if (cut := cut_span(spans, first, stop)) is not None:
            raise ValueError(_cut_text(metadata.req_ids[row], cut, first, stop))
        index = int(np.searchsorted(spans[:, 0], first))
        if index == len(spans) or spans[index, 0] >= stop:
            return False
        if metadata.req_ids[row] in trees:
            raise ValueError(
                f"trees: request {quoted(metadata.req_ids[row])} runs a tree where it has the span "
                f"[{spans[index, 0]}, {spans[index, 1]}); spans are of prompts, which run without drafts"
            )
        return True

    def check_ahead(self, rows: Iterable[int], num_steps: int) -> None:
        """ValueError where the request of one of ``rows`` reaches a span of its own within so many steps of a token."""
        for row in rows:
            first, req_id = self._core.num_computed(row), self._core.order.req_ids[row]
            for start, stop in self.of_row(row).tolist():
                if start < first + num_steps and stop > first:
                    raise ValueError(
                        f"run_ahead: request {quoted(req_id)} reaches its span [{start}, {stop}) "
                        f"within {counted(num_steps, 'step')}; a span runs in one step, which build() makes"
                    )


def _cut_text(req_id: Hashable, span: tuple[int, int], first: int, stop: int) -> str:
    start, end = span
    if start < first:
        return (
            f"spans: request {quoted(req_id)} has {counted(first, 'computed token')}, which end within its span "
            f"[{start}, {end}); the whole span runs in one step, so take back {first - start} with batch.rollback, or "
            f"add the request with {start} at most"
        )
    return (
        f"scheduled: tokens {first} to {stop - 1} of request {quoted(req_id)} cut its span [{start}, {end}), which "
        f"runs in one step; schedule {counted(end - first, 'token')} or more"
        + (f", or {start - first}" if start > first else "")
    )


def check_spans(backends: Backends, settings: Settings, takes_verdicts: bool) -> None:
    """ValueError where a builder cannot run a batch with spans; the text says why, and what to do."""
    if settings.context_parallel is not None:
        raise ValueError("batch: made with spans, but not with context_parallel; a rank has some of a span's keys")
    if takes_verdicts:
        raise ValueError(
            "batch: made with spans, but not with num_rejected; the host has to know which tokens a step runs"
        )
    for name, backend in backends.by_group.items():
        if backend is not None and backend.spec is not None and FEATURE not in backend.spec.features:
            why = backend.spec.unsupported.get(FEATURE, "its spec does not declare it")
            raise ValueError(
                f"batch: made with spans, but backend {backend.name!r} of group {name!r} does not have the feature "
                f"{FEATURE} ({why}); ask for it in the request, features={{{FEATURE!r}}}"
            )
