"""The transport ``copy``: sends a step to the device as one packed copy of its pinned arena. Needs torch only.

An event says when the arena may be written again. Block tables are not copied: the device has its own (``tables``), and
a journal of new columns at the end of the arena brings them up to date.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from attncore import graphs
from attncore.builder.device.ahead import ADVANCED, Ahead
from attncore.builder.device.arena import HEADER_NBYTES, JOURNAL_ENTRY_NBYTES
from attncore.builder.device.corrections import Corrections
from attncore.builder.device.memory import Readers, device_bytes, pinned_bytes
from attncore.builder.device.tables import DeviceTables
from attncore.errors import AttncoreError
from attncore.kernels.codes import HEADER_COUNTS, HEADER_RUNNING, RECEIPT_AHEAD, RECEIPT_WORDS

if TYPE_CHECKING:
    from attncore.builder.device.arena import ArenaRing, Capacity, Views
    from attncore.builder.device.captured_sizes import Bucket
    from attncore.builder.device.tables import HostTable

JOURNAL_ENTRIES = 4096
"""New block ids that fit into the journal of an arena; further ones are sent in extra copies."""

_KEPT: list[Any] = []
"""Memory of builders that were dropped without ``close``: a graph may still read it."""

_ON_CUDA: weakref.WeakSet[CopyTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in _ON_CUDA:
        transport.forked = True


os.register_at_fork(after_in_child=_after_fork)


class CopyTransport:
    """A builder's memory on ``device`` (a torch device name; ``cpu`` works too and copies, for tests), and its sender.

    ``host_tables`` are the batch's; ``page_lists`` are the indices of the groups that need page indices in each step.
    All memory is taken here and in ``attach``, before any capture. All work runs on the stream that is current when a
    step is built, so that a builder has one compute stream.
    """

    name = "copy"
    """The value of ``MetadataBuilder.transport``."""

    def __init__(self, device: str, host_tables: Sequence[HostTable], page_lists: Sequence[int] = ()) -> None:
        self.device = device
        self._cuda = device.startswith("cuda")
        self._index = 0
        if self._cuda:
            index = torch.device(device).index
            self._index = torch.cuda.current_device() if index is None else index
        self.journal_entries = JOURNAL_ENTRIES
        self.page_lists = list(page_lists)
        self.why = "asked for"
        self.tables = DeviceTables(device, host_tables)
        self.forked = False
        """Whether this is the child of a fork, which has no device."""
        if self._cuda:
            _ON_CUDA.add(self)
        self.ticket = False
        """Whether the engine replays graphs itself. Changes nothing here, since a step is sent when it is built."""
        self.lost = -1
        """The step whose fields on the device may be those of one that was built behind it and taken back."""
        self._issued = -1
        self.corrections: Corrections | None = None
        """Makes the lengths of overlapped steps exact on the device; None where steps do not overlap."""

    def attach(self, ring: ArenaRing) -> None:
        """Takes the device's arena, and events that say when each of the ring's arenas has been read."""
        self._ring = ring
        self._arena = device_bytes(ring.arena_nbytes, self.device)
        self._pinned = [torch.from_numpy(memory) for memory in ring.memory]
        if self._cuda:  # graphs and copies know only its address: it must outlive a dropped builder
            self._keeper = weakref.finalize(self, _KEPT.append, (ring.memory, self._arena, self.tables.tensors))
            self._keeper.atexit = False
        self._readers = Readers(self.device, len(ring.memory))
        self.unsent = ring.unsent
        """The fields that the last step was sent without. One that was asked for is among them until a step has come
        with it: until then its place holds no numbers of the last step, whose readers have it copied.
        """
        self._asked: frozenset[str] = frozenset()
        self._unasked = ring.unsent
        """What ``unsent`` is once a step was sent with all that is asked for."""
        self._asked_spans: dict[Capacity, list[tuple[int, int]]] = {}
        self._receipt = torch.full((RECEIPT_WORDS,), -1, dtype=torch.int64, device="cpu", pin_memory=self._cuda)
        self._receipt[RECEIPT_AHEAD:] = 0
        states = [table.state for table in self.tables.host]
        self._sender = self.tables.host[0].kernels.StepSender(
            ring.addresses(), states, ring.journal_entries, self._receipt.numpy()
        )
        self.ahead = Ahead(ring, self.tables)
        self._start: Any = None
        self.is_capturing: Callable[[], bool] = partial(graphs.is_capturing, self.device)
        if self._cuda:
            self.is_capturing, self._current = torch.cuda.is_current_stream_capturing, torch.cuda.current_device

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Pinned host memory, uint8[nbytes]; MemoryError where it cannot be allocated."""
        return pinned_bytes(nbytes, self.device, "max_num_batched_tokens, max_num_reqs or depth")

    def correct(self, num_rejected: Any) -> None:
        """Makes steps overlap from now on; ``num_rejected`` is int32 on the device, by row of the last step."""
        self.corrections = Corrections(self._ring, self.tables, num_rejected)

    @property
    def nbytes(self) -> int:
        """Device memory of arena, tables and page indices, bytes."""
        return self._arena.numel() + self.tables.nbytes  # type: ignore[no-any-return]

    def problem(self) -> str:
        """Why this transport does not work on this device; empty where it works."""
        return ""

    def prepare(self, capacity: Capacity) -> Any:
        """Prepares for steps of ``capacity``; returns what their StepShape keeps as ``replay``."""

    def check_ready(self) -> None:
        """Raises RuntimeError where no step can be sent now, since another device is current."""
        if self.forked:
            raise RuntimeError(
                f"build: this builder was made before os.fork(), and its memory on {self.device} is not in the child; "
                "start workers by spawn, and make a builder in each"
            )
        if self._cuda and self._current() != self._index:
            raise RuntimeError(
                f"build: cuda:{self._current()} is the current device, but this builder's steps go "
                f"to cuda:{self._index}; build inside torch.cuda.device({self._index})"
            )

    def close(self) -> None:
        """Waits for the device; afterwards the memory may be freed."""
        if self._cuda:
            torch.cuda.synchronize(self._index)
            self._keeper.detach()

    def record(self, shape: Any) -> None:
        """Called first inside a capture. Does nothing here: a step is sent before its graph is replayed."""

    def record_next(self, shape: Any) -> None:
        """Called between two steps that are captured in one graph: the device advances the first."""
        graphs.launch(self._advance, shape.capacity)  # a stand-in for a graph repeats what is launched alone

    def _advance(self, capacity: Capacity) -> None:
        views = self.views(capacity)
        if not self._cuda and self._arena[:HEADER_NBYTES].view(torch.int64)[HEADER_RUNNING] > 0:
            self._sender.last = -1  # a stand-in's Python runs on, and finds the host's counts no longer the device's
        self.ahead.compute(self._arena, views, self.ahead.start_of(views), 1, self.page_lists)

    def replay(self, step: int, graph: Any) -> None:
        """Replays a graph over ``step``."""
        graph.replay()

    def start_ahead(self, shape: Any) -> None:
        """Called behind ``send`` of a step, padded to ``shape``, that others follow without a build."""
        self._issue(self._keep_start, shape.capacity)
        self._sender.start_ahead()

    def _keep_start(self, capacity: Capacity) -> None:
        self._start = self.ahead.start_of(self.views(capacity))

    def end_ahead(self) -> None:
        """Called when the last of the steps was replayed, or the others were given back."""
        self._sender.ahead = False

    def replay_ahead(self, step: int, shape: Any, done: int, count: int, graph: Any) -> None:
        """Replays a graph of ``count`` steps behind ``done`` of those that begin with ``step``, which was built."""
        if done:
            self._sender.last = -1  # what the host has of the step is no longer what the device has

            def advance() -> None:
                views = self.views(shape.capacity)
                self.ahead.compute(self._arena, views, self._start, done, self.page_lists)

            self._issue(advance)
        graph.replay()
        if count > 1:
            self._sender.last = -1

    def settle_ahead(self, step: int, done: int) -> int:
        """How many of the steps that begin with ``step`` were run, where ``done`` replays came to their end."""
        return done

    def release(self, shape: Any) -> None:
        """Called when the graph that was captured over a StepShape was destroyed."""

    def recorded(self) -> list[Bucket]:
        """The captured sizes whose graphs fetch their steps from the arenas."""
        return []

    @property
    def sent(self) -> int:
        """The last step that was sent; -1: none."""
        return self._sender.sent  # type: ignore[no-any-return]

    @sent.setter
    def sent(self, step: int) -> None:
        self._sender.sent = step

    @property
    def pending(self) -> int:
        """The step that waits for the replay of its graph; -1: none."""
        return self._sender.pending  # type: ignore[no-any-return]

    @pending.setter
    def pending(self, step: int) -> None:
        self._sender.pending = step

    @property
    def pending_shape(self) -> Any:
        """The StepShape of the step that waits."""
        return self._sender.pending_shape

    launch: Callable[[int, Any], bool] | None = None
    """Replays a graph over a step in one call, or answers False; None where ``replay`` has more to do."""

    def in_one_call(self, kernels: Any, kernel: Any, core: Any, backends: Any, eager: list[Any], fill: Any) -> Any:
        """What builds and sends a step in one call (the kernels' SentSteps); None where a step takes more."""

    def take_back(self, step: int) -> None:
        """Makes ``step`` unsent; the next step sends every block again, since it is not known what arrived."""
        self.sent, self._sender.ahead = min(self.sent, step - 1), False
        if self._may_have_arrived(step):
            self.lost = step - 1
        self.tables.forget()

    def _may_have_arrived(self, step: int) -> bool:
        return self._issued == step

    def views(self, capacity: Capacity) -> Views:
        """The device arena's fields for steps of ``capacity``, as tensors."""
        return self._ring.views_of(capacity, self._view)

    def wait(self, step: int) -> None:
        """Waits until the device has read the arena of ``step``; returns at once where there was no such step."""
        if step >= 0:
            self._wait_for(step % self._ring.depth)

    def send(self, step: int, shape: Any, out: Any, num_rows: int, waits: bool) -> None:
        """Sends a step's arena and the journal of ``num_rows`` rows; the device's tables then equal the batch's.

        ``shape`` is the step's StepShape, ``out`` its StepArena. ``waits``: a graph will be replayed over the step.
        """
        arena = step % self._ring.depth
        total = self._sender.write(step, shape, out, num_rows)
        if total == self._ring.journal_entries:
            self.send_surplus(num_rows)
        start = shape.tail
        stop = start + JOURNAL_ENTRY_NBYTES * total
        counts = self._ring.header(arena)[HEADER_COUNTS : HEADER_COUNTS + len(self.tables)].tolist()
        self._issued = step
        self._issue(self._copy, arena, 0, stop)
        if self._asked:
            self._send_asked(step, shape.capacity)
        self._record(arena)
        for index, count in enumerate(counts):
            if count:
                end = start + JOURNAL_ENTRY_NBYTES * count
                self._issue(self.tables.apply, index, self._arena[start:end].view(torch.int64))
                start = end
        if self.corrections is not None:
            self._issue(self._correct, shape.capacity, out.num_reqs, out.num_tokens)
        self._sender.note_sent(step, shape)

    def send_with(self, name: str, step: int, padded: bool) -> bool:
        """Sends every later step with a field of ``unsent``; whether its place on the device is that of ``step``, too.

        The field of the last step, which was sent without it, is sent now; while a stream is capturing, and of a step
        that is being built, it comes with the next step. An older step's is not sent, for the place is the last one's
        by now; a ``padded`` one's is the place that its graph reads nevertheless, and holds what the last step has
        where that is of the size. AttncoreError for a field that steps ahead have moved on: what it holds is not known
        by then.
        """
        last, shape = self._sender.last, self._sender.last_shape
        if self._is_ahead(step):
            last = step
            if name in ADVANCED and not self.is_capturing():
                raise AttncoreError(
                    f"metadata: {name} was not sent with step {step}, and the device is steps ahead of it; read it "
                    "before they are replayed, such as in the warm-up of the graph, or declare it (device_needs)"
                )
        if step <= self.sent and step != last and not padded:
            return False
        self._ask({name})
        if step <= last <= self.sent and not self.is_capturing():
            memory = self._ring.memory[last % self._ring.depth]
            for start, stop in self._ring.spans(shape.capacity, (name,)):  # of a copy: no event says when this was read
                self._issue(self._arena[start:stop].copy_, torch.from_numpy(memory[start:stop].copy()))
            if name == "seq_start_loc" and self._sender.ahead and self._start is not None:
                self._issue(self._keep_start, shape.capacity)  # what was kept had not been sent; nothing was replayed
            self.unsent -= {name}  # last: an interrupted call begins anew
        return True

    def send_with_all(self) -> None:
        """Sends every later step with all fields."""
        self._ask(self.unsent)

    def _ask(self, names: Collection[str]) -> None:
        """Sends every later step with ``names``. The last one was not sent with them."""
        self._asked_spans = {}
        self._asked |= frozenset(names)
        self._sender.alone = not self._asked
        self._unasked = self._ring.unsent - self._asked

    def _send_asked(self, step: int, capacity: Capacity) -> None:
        """Sends the fields of a step that were asked for, and that no backend declares, in copies of their own."""
        self._issued = step  # first: an interrupted call may have sent some
        spans = self._asked_spans.get(capacity)
        if spans is None:
            spans = self._asked_spans[capacity] = self._ring.spans(capacity, self._asked)
        for start, stop in spans:
            self._issue(self._copy, step % self._ring.depth, start, stop)
        self.unsent = self._unasked

    def send_surplus(self, num_rows: int) -> None:
        """Brings the tables up to date with the entries of ``num_rows`` rows for which the journal has no room."""
        for index, entries in self.tables.surplus(num_rows):
            self._issue(self.tables.apply, index, entries)

    def pages_of(self, index: int, metadata: Any) -> Any:
        """``paged_kv_indices`` of a step, gathered on the first access after it was sent.

        A plan runs before that: it gets the address that they will have, and must not read them.
        """
        if self.sent < metadata.step:
            return self.page_buffer(index)[: int(metadata.host.paged_kv_indptr[-1])]
        if self._is_ahead(metadata.step):
            return metadata.read_alone(lambda: self._gather_there(index, metadata.paged_kv_indptr))
        gather = partial(self.tables.gather_pages, index, metadata)
        return metadata.once_a_step("_indices", lambda: metadata.read_alone(gather))

    def _gather_there(self, index: int, indptr: Any) -> Any:
        self.tables.gather_pages_there(index, indptr)
        return self.page_buffer(index)[: int(indptr[-1])]

    def _is_ahead(self, step: int) -> bool:
        """Whether the device is ahead of ``step``, the last one that was sent: how many pages there are, it says."""
        return self.sent == step and self._sender.last < 0

    def page_buffer(self, index: int) -> Any:
        """The buffer of page indices of group ``index``, int32[rows * width], at a fixed address."""
        return self.tables.page_buffer(index)

    # Work of the device, in the order of its stream; tests override these to run it later.

    def _issue(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def _record(self, arena: int) -> None:
        self._readers.record(arena)

    def _wait_for(self, arena: int) -> None:
        self._readers.wait(arena)

    def _copy(self, arena: int, start: int, stop: int) -> None:
        # Elsewhere no event says when the arena has been read: the copy is complete when this returns.
        self._arena[start:stop].copy_(self._pinned[arena][start:stop], non_blocking=self._cuda)

    def _correct(self, capacity: Capacity, num_rows: int, num_tokens: int) -> None:
        if self.corrections is None:
            return
        if self._cuda:
            self.corrections.launch(self._arena, capacity)
        else:
            running = int(self._arena[:HEADER_NBYTES].view(torch.int64)[HEADER_RUNNING])
            self.corrections.compute(self.views(capacity), num_rows, num_tokens, running)

    def _view(self, offset: int, length: int, dtype: type[np.generic]) -> Any:
        nbytes = length * np.dtype(dtype).itemsize
        return self._arena[offset : offset + nbytes].view(getattr(torch, np.dtype(dtype).name))
