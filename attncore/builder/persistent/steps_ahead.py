"""StepsAhead: steps of one token for every request of which the first is built and the device makes the others."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from attncore import arguments
from attncore.builder.fields import ACTUAL_COUNTS, ARRAYS, COUNTS
from attncore.builder.metadata import CommonAttentionMetadata
from attncore.builder.persistent import taking_back
from attncore.builder.persistent.state_step import StatesOfRows, StateStep
from attncore.builder.read_only import read_only
from attncore.builder.slices import HostArrays
from attncore.builder.uncopied import Uncopied
from attncore.errors import AttncoreError, CaptureError
from attncore.kernels import codes
from attncore.quoted import quoted
from attncore.show import counted

if TYPE_CHECKING:
    from attncore.builder.device.by_copy import CopyTransport
    from attncore.builder.persistent.step_metadata import StepMetadata


class StepsAhead(Uncopied):
    """What ``builder.run_ahead`` returns: ``len(steps)`` steps, each of which a replay runs.

    ``first`` is the metadata of the step that was built, whose fields on the device are those of the step that runs.
    ``steps[i]`` is what the host knows of step i, from 0: metadata of NumPy arrays, made when it is asked for, with the
    states and without the engine's own fields. Ask for it within ``depth`` more builds, and before a request leaves or
    blocks move; what was made stays.
    """

    def __init__(
        self, assembly: Any, side: CopyTransport, shape: Any, metadata: StepMetadata, first: Any, num_steps: int
    ) -> None:
        self._assembly, self._side, self._core, self._shape = assembly, side, assembly.core, shape
        self._metadata, self.first = metadata, first
        self._num_steps, self._launched = num_steps, 0
        self._changes = metadata._arena.changes
        self._left: frozenset[int] = frozenset()
        self._launch: Any = None  # the kernels' SentAhead.launch, where that has made these
        self.step: int = metadata.step
        """The number of the step that was built, which all of them have."""

    def __len__(self) -> int:
        """How many steps these are; after ``stop`` those that ran."""
        return self._num_steps

    def __repr__(self) -> str:
        return f"<StepsAhead of step {self.step}: {self._launched} of {self._num_steps} replayed>"

    @property
    def launched(self) -> int:
        """How many of the steps were replayed."""
        return self._launched

    @property
    def left(self) -> int:
        """How many of the steps are not replayed yet. The next build waits for them, or for ``stop``."""
        return self._num_steps - self._launched

    def replay(self, graph: Any, count: int = 1) -> None:
        """Replays ``graph``, which was captured over this size, for the next step, or the next ``count`` steps.

        ``count`` is how many steps the graph was captured with: 1 and one more for each ``metadata.record_next()``.
        Raises ValueError where fewer are left, CaptureError where a request has left or blocks have moved since the
        last replay.
        """
        assembly = self._assembly
        if self._launch is not None and self._launch(self, graph, count):
            assembly.shapes.forget_captured(self._shape.bucket)
            return
        count = arguments.integer("count", count, 1)
        assembly.check_replay(self._metadata, graph)
        if count > self.left:
            raise ValueError(
                f"count: {counted(count, 'step')} asked for, with {self.left} of {self._num_steps} left; replay a "
                "graph of fewer steps, or build the next ones"
            )
        if self._launched and self._core.state.changes != self._changes:
            raise CaptureError(
                f"replay: requests have left or blocks have moved since step {self.step} was built, and the device "
                "would go on with what it has; call steps.stop(), and build again"
            )
        self._side.replay_ahead(self.step, self._shape, self._launched, count, graph)
        self._launched += count
        if not self.left:
            self._side.end_ahead()
        assembly.shapes.forget_captured(self._shape.bucket)

    def stop(self) -> int:
        """Gives back what was not replayed, as if fewer steps had been asked for; returns how many ran.

        Requests have as many computed tokens less; one that was rolled back further keeps that. Where nothing was
        replayed, the step itself is taken back, as by ``metadata.abandon()``.
        """
        with self._core.enter():
            self.stop_inside()
        return self._num_steps

    def stop_inside(self) -> None:
        """``stop``, inside a call of the batch or its builder."""
        if self.left > 0:
            self._stop(self._side.settle_ahead(self.step, self._launched))
            self._side.end_ahead()

    def _stop(self, ran: int) -> None:
        core, n = self._core, self._metadata.num_actual_reqs
        context, computed = self._metadata.host.context_lens[:n], core.lengths[codes.COMPUTED]
        counts = {"_num_steps": ran, "_launched": ran}
        if not ran:
            taking_back.check_unchanged(self._assembly, self._metadata, "stop", self._num_steps)
            taking_back.take_back(self._assembly, self._metadata, (vars(self).update, counts))
            return
        indices, rows = self._rows()
        further = np.flatnonzero(computed[rows] > context[indices] + self._num_steps)
        if len(further):
            raise CaptureError(
                f"stop: request {quoted(self._metadata.req_ids[indices[further[0]]])} has run further since step "
                f"{self.step} was built; stop before another builder builds over the batch"
            )
        core.undo.append((vars(self).update, {name: vars(self)[name] for name in counts}))
        core.undo.append((np.copyto, computed, computed.copy()))
        computed[rows] = np.minimum(computed[rows], context[indices] + ran)
        vars(self).update(counts)

    def _rows(self) -> tuple[Any, Any]:
        """The row in the step, and in the batch, of each request that has neither left nor been preempted since."""
        req_ids, order = self._metadata.req_ids, self._core.order
        if not self._left and self._core.state.changes == self._changes:
            rows = np.arange(len(req_ids))
            return rows, rows
        row_of = {id(req_id): row for row, req_id in enumerate(order.req_ids) if req_id is not None}
        indices = [index for index in range(len(req_ids)) if index not in self._left]
        return np.array(indices, np.intp), np.array([row_of[id(req_ids[index])] for index in indices], np.intp)

    def leave(self, req_id: Any) -> None:
        """A request leaves, or loses its progress: whoever has its name later has run none of these steps."""
        index = next((index for index, held in enumerate(self._metadata.req_ids) if held is req_id), None)
        if self.left and index is not None:
            self._core.undo.append((vars(self).update, {"_left": self._left}))
            self._left = self._left | {index}

    def waits_for(self, shape: Any) -> bool:
        """Whether some of the steps are left, and are of ``shape``."""
        return self.left > 0 and self._shape is shape

    def refuse_left(self) -> None:
        """CaptureError where some of the steps are not replayed yet."""
        if self.left > 0:  # below 0 where what was replayed called ``stop``
            raise CaptureError(
                f"build: {self.left} of {counted(self._num_steps, 'step')} ahead not replayed yet; replay them with "
                "steps.replay(graph), or call steps.stop()"
            )

    def _holds_arena(self) -> bool:
        """Whether the step's arrays are still in its arena, which steps of every size take in turn."""
        own, last = self._metadata._arena, self._assembly.kernel.last
        return own.step == self.step and last[self.step % len(last)] is own

    def __getitem__(self, index: int) -> Any:
        """The metadata of the step ``index`` behind the first, on the host. IndexError beyond the last."""
        index = arguments.integer("index", index, -self._num_steps)
        if index >= self._num_steps:  # what ends a loop over the steps
            raise IndexError(f"index: {index}, but these are {counted(self._num_steps, 'step')}")
        index += self._num_steps * (index < 0)
        groups = self._metadata.read_alone(partial(self._groups_of, index))
        self._check_arena()  # again: a build into an arena of another size may have come in between
        return groups[self._metadata.group]

    def _groups_of(self, index: int) -> dict[str, CommonAttentionMetadata]:
        self._check_arena()
        groups: dict[str, CommonAttentionMetadata] = {}
        for name, of_group in self._metadata.groups.items():
            groups[name] = _advanced(of_group, index, self._core.tables[name])
            vars(groups[name])["groups"] = MappingProxyType(groups)
            vars(groups[name])["states"] = MappingProxyType(_states(of_group, groups[name]))
        return groups

    def _check_arena(self) -> None:
        if not self._holds_arena():
            raise AttncoreError(
                f"steps: step {self.step} was asked for after its arena was taken by a later one; ask before `depth` "
                "more builds, or give the builder a larger depth"
            )


def _states(first: StepMetadata, ahead: CommonAttentionMetadata) -> dict[str, StateStep]:
    """The states of a step ahead: the slots are those of the step that was built."""
    slots = {name: read_only(np.array(of_group.host.state_slot)) for name, of_group in first.states.items()}
    return {name: StatesOfRows(ahead, name, found, found) for name, found in slots.items()}


def _advanced(first: StepMetadata, steps: int, table: Any) -> CommonAttentionMetadata:
    """The step that is ``steps`` behind ``first``, as the layers of its KV-cache group see it."""
    host, running, cross = first.host, first.num_actual_reqs, table.group.cross
    if host.table_changed:  # type: ignore[attr-defined]
        raise AttncoreError(
            "steps: requests have left or blocks have moved since they were built; ask for them before the batch "
            "changes"
        )
    found = {name: host.peek(name) for name in ARRAYS}  # type: ignore[attr-defined]
    arrays: dict[str, Any] = {name: np.array(array) for name, array in found.items() if array is not None}
    positions = arrays["positions"][:running] + steps
    arrays["positions"][:running] = arrays["context_lens"][:running] = positions
    if not cross:
        size = table.group.tokens_per_column
        arrays["seq_lens"][:running] = positions + 1
        arrays["seq_start_loc"] += steps * np.minimum(np.arange(len(arrays["seq_start_loc"])), running).astype(np.int32)
        blocks = arrays["block_table"][np.arange(running), positions // size].astype(np.int64)
        arrays["slot_mapping"][:running] = blocks * size + positions % size
        arrays["paged_kv_indptr"][1 : running + 1] = np.cumsum(positions // size + 1)
        arrays["paged_kv_indptr"][running + 1 :] = arrays["paged_kv_indptr"][running]
        arrays["paged_kv_last_page_len"][:running] = positions % size + 1
    arrays["paged_kv_indices"] = table.page_indices(arrays["paged_kv_indptr"])
    if hasattr(host, "span_ends"):  # of a batch with spans: steps ahead stop ahead of them
        arrays.setdefault("span_ends", None)
    values: dict[str, Any] = {name: getattr(first, name) for name in (*COUNTS, *ACTUAL_COUNTS)}
    longest = int(positions.max(initial=-1)) + 1
    values["max_decode_seq_len"] = max(values["max_decode_seq_len"], longest)
    if not cross:
        values["max_seq_len"] = values["max_decode_seq_len"]
    return CommonAttentionMetadata(
        HostArrays(**arrays), **values, req_ids=first.req_ids, decodes_first=True, builder=first.builder,
        step=first.step, group=first.group,
    )  # fmt: skip
