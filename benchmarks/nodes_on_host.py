"""The transport ``graph`` on a CPU: what its nodes do on a device is done by NumPy. To follow the host's part there."""

from functools import partial
from unittest import mock

import numpy as np

from attncore.builder.device.by_graph import GraphTransport
from attncore.builder.device.triton_kernels import STATE_AHEAD
from attncore.builder.persistent import assembly
from attncore.kernels.codes import (
    HEADER_COUNTS,
    HEADER_LAUNCH,
    HEADER_ROWS,
    RECEIPT_AHEAD,
    RECEIPT_LAUNCHED,
    launch_word,
)


class NodesOnHost(GraphTransport):
    """``record`` runs the nodes at once, and again with each replay of a graph that is a function called again."""

    launched = staticmethod(lambda call, name: call)
    """``around`` of the clocks: the nodes of an eager step are no part of its build."""

    def attach(self, ring):
        super().attach(ring)
        self.why = "its nodes run on the host"
        self.host_arena, self.state = self._arena.numpy(), self._state.numpy()

    def problem(self):
        return ""

    def send_with_all(self):
        """Called for a capture on a CPU, where a graph reads what was not sent, too; these are read as on a device."""

    def prepare(self, capacity):
        return partial(self._replay_small, capacity)

    def _replay_small(self, capacity):
        self.launched(self._nodes, "launch")(capacity)

    def _nodes(self, capacity, *, corrects=True):
        ring, step = self._ring, int(self.state[0]) + 1
        memory, header = ring.memory[step % ring.depth], ring.header(step % ring.depth)
        nbytes = ring.journal_offset(capacity)
        if header[HEADER_LAUNCH] != launch_word(1 + step + int(self.state[STATE_AHEAD]), nbytes):
            if self.state[STATE_AHEAD] < self._seen[RECEIPT_LAUNCHED]:
                views = self.views(capacity)
                self.ahead.compute(self._arena, views, self.ahead.start_of(views), 1, self.page_lists)
                self.state[STATE_AHEAD] += 1
                self._seen[RECEIPT_AHEAD] = self.state[STATE_AHEAD]
            else:
                self.host_arena[:nbytes] = 0
            return
        self.host_arena[:nbytes] = memory[:nbytes]
        entries = memory[nbytes:].view(np.int64)
        for table, count in zip(self.tables.tensors, header[HEADER_COUNTS:].tolist(), strict=False):
            table.numpy().reshape(-1)[entries[:count] & 0xFFFFFFFF] = entries[:count] >> 32
            entries = entries[count:]
        groups, rows = ring.views_of(capacity, self._view).groups, int(header[HEADER_ROWS])
        for index in self.page_lists:
            indptr = groups[index]["paged_kv_indptr"].numpy()[: rows + 1]
            table, out = self.tables.tensors[index].numpy(), self.page_buffer(index).numpy()
            for row, (start, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
                out[start:end] = table[row, : end - start]
        self.state[0] = step
        self._seen[0] = step


def nodes_on_host(around):
    """Inside of it, builders on a CPU send by these nodes; ``around`` clocks them."""
    cls = type("NodesOnHost", (NodesOnHost,), {"launched": staticmethod(around)})
    return mock.patch.object(assembly, "new_transport", lambda _, *args: cls(*args))
