"""The metadata of a step of the persistent builder: an object for each arena and StepShape, reused step after step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from attncore.builder.device.arena import Arrays
from attncore.builder.device_slices import DeviceView
from attncore.builder.fields import ACTUAL_COUNTS, COUNTS, DERIVED, Field
from attncore.builder.metadata import CommonAttentionMetadata, Wrap
from attncore.builder.persistent.host_fields import STEP_ARRAYS, HostFields, cut, read_alone
from attncore.builder.persistent.state_step import StateStep
from attncore.builder.read_only import read_only
from attncore.builder.reused import Reused

if TYPE_CHECKING:
    from attncore.builder.device.by_copy import CopyTransport
    from attncore.builder.persistent.batch_core import BatchCore
    from attncore.builder.persistent.block_table import BlockTable

_ONCE_A_STEP = frozenset(("_indices", "_span_ends", "_decode", "_prefill", "_kept", *(f"_{name}" for name in DERIVED)))

_MADE_ONCE = _ONCE_A_STEP - {"_kept"}

_NONE_YET: tuple[None, None] = None, None
"""In the place of a step's number and what is kept for that step."""


def _count(name: str) -> Any:
    return property(lambda self: getattr(self._arena, name))


class StepMetadata(Reused, CommonAttentionMetadata):
    """The metadata of one step. Read-only, and valid until its arena is used again, ``depth`` builds later.

    ``block_table`` is the live table: it, and what is gathered from it (``paged_kv_indices``, the tables of views),
    belongs to this step until a request leaves, is preempted or truncated, or a build moves rows. Read page indices
    before that; afterwards the access raises AttncoreError.

    ``groups`` maps each KV-cache group's name to the step as that group's layers see it, with its own slots, table and
    pages; everything else is shared. A batch of one group has one entry, the step itself.
    """

    decodes_first = True
    use_cuda_graph = False
    step = _count("step")
    req_ids = _count("req_ids")
    moves = _count("moves")
    num_actual_reqs: int
    """Requests without padding; ``num_actual_tokens`` are their tokens."""
    num_actual_tokens: int

    groups: Mapping[str, StepMetadata]
    states: Mapping[str, StateStep]
    """The step as the layers of each group of states see it, by the group's name; empty without such groups."""
    group: str
    """The KV-cache group whose slots and table these are."""
    _kept: tuple[int | None, Any] = _NONE_YET

    def __init__(
        self, arena: Any, group: str, arrays: Arrays, tables: Mapping[str, BlockTable], state: Any, wrap: Wrap,
        device: Mapping[str, Any] | None, pages: Callable[[Any], Any] | None, buffer: Callable[[], Any] | None,
        owner: Owner, extra: Mapping[str, Field], side: CopyTransport | None, *, padded: bool,
    ) -> None:  # fmt: skip
        values: dict[str, Any] = {"group": group, "use_cuda_graph": padded}
        super().__init__(HostFields(arena, arrays, tables, state, extra), wrap, **values)
        self._extra = extra
        self._arena, self._arrays, self._device, self._pages = arena, arrays, device, pages
        self._buffer, self._owner, self._side = buffer, owner, side

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes. On a device, and for a captured graph, fields have fixed addresses.
            if name.startswith("_"):  # asked of every object by copy, pickle and NumPy
                raise AttributeError(name)
            if name in DERIVED:
                if (self.use_cuda_graph and self._device is not None) or not self._is_on_device:
                    # A graph has to compute it, though a warm-up has read it; steps ahead have one number.
                    return self._derived(name)
                return self.once_a_step(f"_{name}", lambda: self._derived(name))
            if self._device is not None and name in self._device:
                side = self._side
                if (
                    side is not None
                    and name in side.unsent
                    and not side.send_with(name, self.step, self.use_cuda_graph)
                ):
                    return self._wrapped(name)  # not kept: the next step in this arena has it on the device
                value = cut(self._device[name], name, self._arena, self._extra)
                if side is not None and name in side.unsent:  # not kept: it comes with the next step
                    return value
            elif name in self._extra:
                value = self._wrapped(name)
            else:
                value = self._of_host(name)
            if self._wrap is read_only and isinstance(value, np.ndarray):
                return read_only(value)  # not kept: its shape may be set, and the next step would have that
            self.__dict__[name] = value
            return value

    def __dir__(self) -> list[str]:
        return sorted(({*super().__dir__()} - (STEP_ARRAYS - {*dir(self.host)})) | self._extra.keys())

    def _page_indices(self) -> Any:
        if self._pages is not None:
            return self._pages(self)
        return self.once_a_step("_indices", lambda: self._wrapped("paged_kv_indices"))

    paged_kv_indices: Any = property(_page_indices)  # on a GPU, gathered there

    def set_has_spans(self, has_spans: bool | None) -> None:
        """Whether this step has ``span_ends``; None: each one that this object is of. Called by the builder."""
        step = None if has_spans is None else self.step if has_spans else -1
        for metadata in self.groups.values():
            vars(metadata.host)["_spans_of_step"] = step

    def _ends_of_spans(self) -> Any:
        # An AttributeError, of a batch without spans, is that of __getattr__, which is asked then.
        return None if self.host.span_ends is None else self.once_a_step("_span_ends", self._new_ends_of_spans)

    def _new_ends_of_spans(self) -> Any:
        if self._device is not None:
            return cut(self._device["span_ends"], "span_ends", self._arena, self._extra)
        return self._wrapped("span_ends")

    span_ends: Any = property(_ends_of_spans)

    @property
    def builder(self) -> Any:
        """The MetadataBuilder whose step this is."""
        return self._owner.builder

    @property
    def page_buffer(self) -> Any:
        """int32[max_num_reqs * width] on the device, of which ``paged_kv_indices`` is a slice in every step.

        None where steps are read where they are built.
        """
        return None if self._buffer is None else self._buffer()

    def record(self) -> None:
        """Call it first inside the capture of a graph over this metadata (``builder.capture``).

        With the transport ``graph`` it records the nodes that fetch each step. Behind them a backend records what plans
        each step on the device, where it can (``AttentionBackend.record_plan``).
        """
        self._owner.record(self)

    def record_next(self) -> None:
        """Call it between two steps that one graph is captured with: the second is that of one token more.

        Such a graph runs several steps of ``builder.run_ahead``: ``steps.replay(graph, count)``.
        """
        self._owner.record_next(self)

    def replay(self, graph: Any) -> None:
        """Replays ``graph``, which was captured over this step's bucket, for this step. Once for each build.

        Raises CaptureError where the step was built without a bucket and, with the transport ``graph``, where it was
        replayed already or its graph was captured without ``record``. With others, a second replay runs it once more.
        """
        self._owner.replay(self, graph)

    def abandon(self) -> None:
        """Takes back the last step, which will not be replayed, as if it had not been built.

        Raises CaptureError for any other step, and where the transport is not ``graph``: no step waits for its replay
        then, and ``batch.rollback_many`` takes its tokens back.
        """
        self._owner.abandon(self)

    def views(self) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
        """Where arrays are cached, and by which names: the kernel drops them where a step has other counts."""
        names = tuple(STEP_ARRAYS | self._extra.keys())
        host: Any = self.host
        return [(vars(self), names), (host._kept_views, names)]

    def forget_step(self) -> None:
        """Called by the kernel when this arena's step is taken back: the next step has the same number."""
        for metadata in self.groups.values():
            for key in _ONCE_A_STEP & metadata.__dict__.keys():
                del metadata.__dict__[key]
        self.set_has_spans(False)

    def forget_made(self) -> None:
        """Called once engines have filled their fields: views that were taken meanwhile, and what was computed on the
        device, are of arrays that the step was not in yet.
        """
        for metadata in self.groups.values():
            for key in _MADE_ONCE & metadata.__dict__.keys():
                del metadata.__dict__[key]

    def _cached(self, key: str, make: Any) -> Any:
        return self.once_a_step(key, make)

    @property
    def kept(self) -> dict[Any, Any]:
        """See the base class. Every layer reads it, so it makes no call from the second time on."""
        step, kept = self._kept
        found: dict[Any, Any] = kept if step == self._arena.step else self.once_a_step("_kept", dict)
        return found

    def once_a_step(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of ``make``, called once for this step and kept under ``key`` until the next one."""
        step, value = self.__dict__.get(key, _NONE_YET)
        if step != (current := self._arena.step):
            value = make()
            self.__dict__[key] = current, value  # not the step's of a build that came in between
        return value

    @property
    def _is_on_device(self) -> bool:
        """Whether the step was sent; True where steps are read where they are built."""
        return self._side is None or self._side.sent >= self._arena.step

    def read_alone(self, read: Callable[[], Any]) -> Any:
        """``read_alone`` of tables on the device."""
        return read_alone(self._owner.core.state, self._arena, read)

    def _prefill_view(self) -> CommonAttentionMetadata | None:
        view = super()._prefill_view()
        if view is not None and "prefill_seq_start_loc" in self._arrays:
            for name in ("query_start_loc", "seq_start_loc"):  # the kernel wrote the rebased sums in the same pass
                setattr(view.host, name, self._arrays[f"prefill_{name}"][: self.num_prefills + 1])
                exact = name == "query_start_loc" or self.host_lengths == "exact"
                exact = exact and (self._side is None or f"prefill_{name}" not in self._side.unsent)
                if self._device is not None and exact:  # else the view takes what was corrected on the device
                    setattr(view, name, self._device[f"prefill_{name}"][: self.num_prefills + 1])
        return view

    def _view(
        self, first: int, last: int, start: int, stop: int, *, whole_encoder: bool = False, **counts: int
    ) -> CommonAttentionMetadata:
        view = super()._view(first, last, start, stop, whole_encoder=whole_encoder, **counts)
        vars(view)["_taken_of"] = self, self._arena.step  # what its repr tells its age by
        return view if self._device is None else DeviceView(view, self, first, last, start, stop)


for _name in (*COUNTS, *ACTUAL_COUNTS):
    if _name != "use_cuda_graph":
        setattr(StepMetadata, _name, _count(_name))


class CrossStepMetadata(StepMetadata):
    """A step as its cross-attention layers see it: ``block_table``, lengths and pages are the encoder's.

    ``cross_slot_mapping`` has the slots of the encoder tokens that run; there is no ``slot_mapping``.
    """

    max_seq_len = _count("max_encoder_seq_len")


class HostStepMetadata(StepMetadata):
    """A step of a builder without a backend, where its fields are those of ``host``."""


class HostCrossStepMetadata(CrossStepMetadata):
    """The same for cross-attention layers."""


def _of_host(name: str) -> Any:
    return property(lambda self: getattr(self.host, name))


for _class in (HostStepMetadata, HostCrossStepMetadata):
    _class._copied_as = _class.__mro__[1]  # whose fields can be set
    _class.__name__ = _class._copied_as.__name__  # in messages they are what they stand in for
    for _name in STEP_ARRAYS:
        setattr(_class, _name, _of_host(_name))


class StepAtCapture(StepMetadata):
    """What a stand-in graph on the CPU was captured over: the plan is that of the step for which it is replayed."""

    @property
    def kept(self) -> dict[Any, Any]:
        found: dict[Any, Any] | None = self._arena.kept(self.group)
        return super().kept if found is None else found


class CrossStepAtCapture(StepAtCapture, CrossStepMetadata):
    """The same as its cross-attention layers see it."""


class Owner(Protocol):
    """What metadata asks of the assembly that it belongs to."""

    core: BatchCore

    @property
    def builder(self) -> Any: ...
    @property
    def last_step(self) -> int: ...

    kernel: Any

    def moved_on(self, step: int) -> bool: ...
    def record(self, metadata: StepMetadata) -> None: ...
    def record_next(self, metadata: StepMetadata) -> None: ...
    def replay(self, metadata: StepMetadata, graph: Any) -> None: ...
    def abandon(self, metadata: StepMetadata) -> None: ...
