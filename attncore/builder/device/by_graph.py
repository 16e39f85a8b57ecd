"""The transport ``graph``: nodes of captured graphs fetch each step, without a separate copy, event or launch.

A graph that was captured over a step's metadata begins with two nodes. The first checks the header of the next arena,
reads the pinned arena over the bus into the device's arena, and brings the tables up to date from the journal. The
second gathers page indices and writes a receipt, the step's number, to a pinned word: the arena has been read then.
For a step that runs without a graph of the model, a small graph of these nodes alone is replayed. Fields that no
backend declares and that somebody asked for are copied before a replay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attncore.builder.device import triton_kernels
from attncore.builder.device.by_copy import CopyTransport
from attncore.builder.device.captured_sizes import Bucket, ascending, of_size
from attncore.errors import CaptureError
from attncore.graphs import uncollected
from attncore.kernels.codes import (
    HEADER_COUNTS,
    HEADER_LAUNCH,
    HEADER_ROWS,
    RECEIPT_AHEAD,
    RECEIPT_LAUNCHED,
    launch_word,
)

if TYPE_CHECKING:
    from attncore.builder.device.arena import ArenaRing, Capacity
    from attncore.builder.device.tables import HostTable

DEADLINE, TICKET_DEADLINE = 2.0, 0.05
"""Seconds to poll for a receipt before synchronising with the device; the second one with tickets."""


class GraphTransport(CopyTransport):
    """A CopyTransport whose arenas are read by nodes of graphs."""

    name = "graph"

    def __init__(self, device: str, host_tables: Sequence[HostTable], page_lists: Sequence[int] = ()) -> None:
        super().__init__(device, host_tables, page_lists)
        self._small: dict[Capacity, Any] = {}
        self._recorded_shapes: list[Any] = []
        # With tickets: steps without a receipt, and the tables' ``synced`` before each.
        self._unread: list[tuple[int, list[Any]]] = []

    def attach(self, ring: ArenaRing) -> None:
        super().attach(ring)
        self.why = "three steps arrived as they were sent"
        self._state = torch.full((triton_kernels.STATE_WORDS,), -1, dtype=torch.int64, device=self.device)
        self._state[triton_kernels.STATE_AHEAD :].zero_()
        self._ticket = self._state[triton_kernels.STATE_TICKET : triton_kernels.STATE_TICKET + 1]
        self._seen = self._receipt.numpy()
        self._headers = [ring.header(k) for k in range(ring.depth)]
        for header in self._headers:
            header[HEADER_LAUNCH] = 0
        self._base = self._pinned[0]  # the arenas are contiguous
        self._tables_of = torch.tensor([table.data_ptr() for table in self.tables.tensors], device=self.device)
        for index in self.page_lists:
            self.page_buffer(index)
        if not self.ticket:
            self.launch = self._sender.launch

    def in_one_call(self, kernels: Any, kernel: Any, core: Any, backends: Any, eager: list[Any], fill: Any) -> Any:
        if self.ticket or self.corrections is not None or not hasattr(kernels, "SentSteps"):
            return None
        current = self._current if self._cuda else None
        return kernels.SentSteps(
            kernel, self._sender, core, backends, self, eager, fill, self.is_capturing, current, self._index
        )

    def wait(self, step: int) -> None:
        """Waits for the receipt of ``step``, releasing the GIL meanwhile; CaptureError where it does not come."""
        if self._sender.seen(step):
            return
        deadline = time.monotonic() + (TICKET_DEADLINE if self.ticket else DEADLINE)
        while not self._sender.seen(step):
            time.sleep(0)
            if time.monotonic() > deadline:
                torch.cuda.synchronize()
                if self.ticket:  # the engine may have dropped the build: nothing reads its arena any more
                    return
                if not self._sender.seen(step):
                    raise CaptureError(
                        f"build: the device did not read step {step} (it read {int(self._seen[0])}); was its graph "
                        "captured without metadata.record(), or replayed by itself and not by metadata.replay(graph)?"
                    )

    def send(self, step: int, shape: Any, out: Any, num_rows: int, waits: bool) -> None:
        """Writes the journal; the small graph of this capacity then fetches the step, or a later replay (``waits``)."""
        if self.ticket:
            self._keep_watermarks(step)
        if self._sender.write(step, shape, out, num_rows) == self.journal_entries:
            self.send_surplus(num_rows)
        if waits and not self.ticket:
            self._sender.pending_shape, self._sender.pending = shape, step
            return
        if self._asked:  # ahead of the nodes on the stream: their receipt says that this was read, too
            self._send_asked(step, shape.capacity)
        self._sender.publish(step)
        if self.ticket:
            self._ticket.fill_(step)
        if not waits:
            shape.replay()
        self._sender.note_sent(step, shape)

    def _keep_watermarks(self, step: int) -> None:
        """Makes this step send again what unread steps sent: the journal of a step that is never replayed is lost."""
        self._unread = [(unread, before) for unread, before in self._unread if not self._sender.seen(unread)]
        synced = [table.synced for table in self.tables.host]
        for _, before in self._unread:
            for now, then in zip(synced, before, strict=True):
                np.minimum(now, then, out=now)
        self._unread.append((step, [now.copy() for now in synced]))

    def prepare(self, capacity: Capacity) -> Any:
        if capacity not in self._small:
            self._small[capacity] = self._capture_nodes(capacity)
        return self._small[capacity].replay

    def _capture_nodes(self, capacity: Capacity, *, corrects: bool = True) -> Any:
        """Captures a graph of the nodes for a capacity alone."""
        # Compiles the kernels, and reads no arena: no header has the number of the next step.
        self._nodes(capacity, corrects=corrects)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not ``graphs.capturing``: it collects garbage first, which takes longer than the steps that this runs between.
        with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._nodes(capacity, corrects=corrects)
        return graph

    def record(self, shape: Any) -> None:
        """Called first inside a capture: records the nodes that fetch each step."""
        self._nodes(shape.capacity)
        if not shape.recorded:
            shape.recorded = True
            self._recorded_shapes.append(shape)

    def replay(self, step: int, graph: Any) -> None:
        """Publishes the header of ``step`` and replays the graph that was captured over its capacity."""
        if self.ticket:
            graph.replay()
            return
        if step != self.pending:
            raise CaptureError(f"replay: step {step} is not waiting for a replay; each build is replayed once")
        if not self._sender.pending_shape.recorded:
            raise CaptureError(
                f"replay: the graph of {of_size(self._sender.pending_shape.bucket)} does not fetch its "
                "metadata; call metadata.record() first inside its capture"
            )
        launched = False
        if self._sender.published == step:  # a replay of this step was interrupted
            torch.cuda.synchronize()
            launched = self._sender.seen(step)
        if self._asked and not launched:
            self._send_asked(step, self._sender.pending_shape.capacity)
        self._sender.publish(step)
        if not launched:
            graph.replay()
        self._sender.note_sent(step, self._sender.pending_shape)
        self.pending = -1

    def record_next(self, shape: Any) -> None:
        if not shape.recorded:
            raise CaptureError("record_next: it comes behind metadata.record() in a capture; call that first")
        self._nodes(shape.capacity)

    def start_ahead(self, shape: Any) -> None:
        self._sender.start_ahead()

    def replay_ahead(self, step: int, shape: Any, done: int, count: int, graph: Any) -> None:
        if not shape.recorded:
            raise CaptureError(
                f"replay: the graph of {of_size(shape.bucket)} does not fetch its metadata; call "
                "metadata.record() first inside its capture"
            )
        launched, target = False, self._sender.launched_before + done + count - 1
        if self._interrupted(step, done, target):
            torch.cuda.synchronize()
            launched = self._sender.seen(step) and bool(self._seen[RECEIPT_AHEAD] >= target)
        if not done:
            if self._asked and not launched:
                self._send_asked(step, shape.capacity)
            self._sender.publish(step)
        self._sender.launch_ahead(target)
        if not launched:
            graph.replay()
        self._sender.note_sent(step, shape)
        self.pending = -1
        if done + count > 1:  # what the host has of the step is no longer what the device has
            self._sender.last = -1

    def _interrupted(self, step: int, done: int, target: int) -> bool:
        """Whether a replay behind ``done`` steps was interrupted: the device may have run it."""
        if done:
            return bool(self._seen[RECEIPT_LAUNCHED] >= target)
        return bool(self._sender.published == step)

    def settle_ahead(self, step: int, done: int) -> int:
        if self._interrupted(step, done, self._sender.launched_before + done):
            torch.cuda.synchronize()
            ahead = int(self._seen[RECEIPT_AHEAD])
            done = ahead - self._sender.launched_before + 1 if self._sender.seen(step) else 0
            self._sender.launch_ahead(ahead)  # what was not launched will not be
        if done:
            self.sent = step
            self._sender.last = self.pending = -1
        return done

    def release(self, shape: Any) -> None:
        shape.recorded = False
        self._recorded_shapes = [other for other in self._recorded_shapes if other is not shape]

    def recorded(self) -> list[Bucket]:
        return sorted((shape.bucket for shape in self._recorded_shapes), key=ascending)

    def take_back(self, step: int) -> None:
        """Also makes the device expect ``step`` again, where its nodes have read it."""
        super().take_back(step)
        self.pending = -1
        if self._sender.published == step:
            torch.cuda.synchronize()
            if self._seen[0] == step:
                self._state[:1].fill_(step - 1)
                torch.cuda.synchronize()
                self._seen[0] = step - 1
            self._sender.withdraw(step)  # last: where an interrupt comes before it, all of this is done again

    def _may_have_arrived(self, step: int) -> bool:
        return bool(self._sender.published == step) or super()._may_have_arrived(step)  # fields sent beside its nodes

    def check_ready(self) -> None:
        """Also raises CaptureError where the last step still waits for its replay."""
        super().check_ready()
        if self.pending >= 0:
            raise CaptureError(
                f"build: step {self.pending} was built for a graph of "
                f"{of_size(self._sender.pending_shape.bucket)} and not replayed; call metadata.replay(graph), or "
                "metadata.abandon() where it will not run"
            )

    def pages_of(self, index: int, metadata: Any) -> Any:
        if index not in self.page_lists:
            return super().pages_of(index, metadata)
        indptr = metadata.paged_kv_indptr if self._is_ahead(metadata.step) else metadata.host.paged_kv_indptr
        return self.page_buffer(index)[: int(indptr[-1])]

    def _nodes(self, capacity: Capacity, *, corrects: bool = True) -> None:
        ring = self._ring
        nbytes = ring.journal_offset(capacity)
        triton_kernels.read_arena(
            self._base, self._state, self._arena, self._tables_of, nbytes, ring.slots_range(capacity), ring.depth,
            ring.arena_nbytes, len(self.tables), HEADER_COUNTS, self.ticket, self._receipt, self.ahead.places(capacity),
        )  # fmt: skip
        if corrects and self.corrections is not None:
            self._correct(capacity, capacity.num_reqs, capacity.num_tokens)
        views = self.views(capacity)
        indptrs = [views.groups[index]["paged_kv_indptr"] for index in self.page_lists]
        for index, indptr in zip(self.page_lists, indptrs, strict=True):
            triton_kernels.gather_all_pages(
                self._arena, self.tables.tensors[index], indptr, self.page_buffer(index), self._state, self._receipt,
                last=index == self.page_lists[-1],
            )  # fmt: skip
        if not self.page_lists:
            triton_kernels.write_receipt(self._state, self._receipt)

    def problem(self) -> str:
        """Sends three steps of random bytes through a small graph; what went wrong, empty where nothing did."""
        ring = self._ring
        capacity = ring.capacity
        try:
            graph = self._capture_nodes(capacity, corrects=False)
            nbytes = ring.journal_offset(capacity)
            for step in range(3):
                arena = step % ring.depth
                self.wait(step - ring.depth)
                memory = ring.memory[arena][:nbytes]
                memory[:] = np.random.default_rng(step).integers(0, 256, nbytes, np.uint8)
                for group in ring.views(capacity)[arena].groups:  # the nodes read these as indices
                    group["paged_kv_indptr"][:] = np.arange(len(group["paged_kv_indptr"]))
                header = self._headers[arena]
                header[:] = 0
                header[HEADER_LAUNCH], header[HEADER_ROWS] = launch_word(1 + step, nbytes), capacity.num_reqs
                self._ticket.fill_(step)
                graph.replay()
                torch.cuda.synchronize()
                if self._seen[0] != step:
                    return f"no receipt of step {step}"
                if not np.array_equal(self._arena[:nbytes].cpu().numpy(), memory):
                    return f"step {step} arrived otherwise than it was sent"
        except Exception as error:  # whatever the driver or the compiler raises: the transport ``copy`` is used instead
            return f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            self._reset()
        return ""

    def _reset(self) -> None:
        torch.cuda.synchronize()
        self._state[: triton_kernels.STATE_AHEAD].fill_(-1)
        self._arena.zero_()
        self.tables.clear()
        self._seen[0] = -1
        for memory, header in zip(self._ring.memory, self._headers, strict=True):
            memory[:] = 0
            header[HEADER_LAUNCH] = 0
        torch.cuda.synchronize()
